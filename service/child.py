"""A process that is kept running: started, heard, started again when it ends, ended at last.

Knows nothing of what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from service.errors import StartFailed
from service.lifeline import Word, read_word

logger = logging.getLogger(__name__)

# How often a process may end without a word before it was ever ready.
STARTS = 3
# The wait before a process is started again: twice as long each time, unless it had run for a while.
FIRST_DELAY_SECONDS = 0.1
MOST_DELAY_SECONDS = 5.0
STEADY_SECONDS = 10.0


class Child:
    """One post, and the processes that hold it one after the other."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        start_seconds: float,
        *,
        on_ready: Callable[[str], None] = lambda text: None,
        on_end: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`command` is a module and its arguments.

        A process that is not ready after `start_seconds` is killed. `on_ready` gets what it said, `on_end` its id.
        """
        self.name = name
        self.ready = asyncio.Event()
        self.process: Process | None = None
        self._command = [sys.executable, "-m", *command]
        self._environment = environment
        self._start_seconds = start_seconds
        self._missed: int | None = None
        self._on_ready = on_ready
        self._on_end = on_end
        self._ending = False
        self._was_ready = False

    async def keep(self) -> None:
        """Runs the process again and again until `end`; raises StartFailed where it never comes up."""
        starts, delay = 0, 0.0
        while not self._ending:
            began = monotonic()
            starts += 1
            word = await self._run(again=self._was_ready)
            if self._ending:
                return
            if not self._was_ready and (word is not None or starts == STARTS):
                silent = f"the {self.name} ended {STARTS} times at its start; its log says why"
                raise StartFailed(silent if word is None else word.text)
            steady = monotonic() - began > STEADY_SECONDS
            delay = FIRST_DELAY_SECONDS if steady or not delay else min(2 * delay, MOST_DELAY_SECONDS)
            reason = f": {word.text}" if word is not None and not word.ready else ""
            logger.error("the %s ended%s; it is started again in %.1f s", self.name, reason, delay)
            await asyncio.sleep(delay)

    def send_signal(self, number: int) -> None:
        """Sends a signal to a process that is up; one that starts gets it once it is, when it can handle it."""
        if self.process is None or not self.ready.is_set():
            self._missed = number
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self, process: Process | None = None) -> None:
        """Kills the process, or the one given where it still holds the post."""
        if self.process is not None and process in (None, self.process):
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def end(self, timeout_seconds: float) -> None:
        """Ends the process for good: asks first, kills after the timeout."""
        self._ending = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_seconds)
        except TimeoutError:
            logger.error("the %s does not end; it is killed", self.name)
            self.kill(process)
            await process.wait()

    async def _run(self, *, again: bool) -> Word | None:
        """One process from start to end; returns what it said."""
        ours, its = socket.socketpair()
        command = [*self._command, "--again"] if again else self._command
        with its:
            self.process = await asyncio.create_subprocess_exec(*command, stdin=its.fileno(), env=self._environment)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            try:
                async with asyncio.timeout(self._start_seconds):
                    word = read_word(await reader.readline())
            except TimeoutError:
                self.kill()
                await self.process.wait()
                late = f"the {self.name} was not ready after {self._start_seconds:g} s and was killed"
                return Word(ready=False, text=f"{late}; its log says how far it came, CARE_START_SECONDS allows more")
            if word is not None and word.ready:
                self._was_ready = True
                self.ready.set()
                self._on_ready(word.text)
                if (missed := self._missed) is not None:
                    self._missed = None
                    self.send_signal(missed)
            await self.process.wait()
            return word
        finally:
            self.ready.clear()
            self.kill()
            writer.close()
            self._on_end(self.process.pid)

"""Shows progress of long work: a bar on a terminal, elsewhere a line twice a minute with rate and time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Self, TypeVar

from tqdm import tqdm

SAY_EVERY_SECONDS = 30.0
"""Between two lines without a terminal; 0: a line for every update."""

Item = TypeVar("Item")


class Progress:
    """Counts units of work. Without a unit, lines show the time spent so far.

    A thread prints the lines, so that they come while a library is busy. Of nested ones only the innermost prints.
    """

    _active: ClassVar[list[Progress]] = []

    def __init__(
        self, name: str, unit: str = "", total: int | None = None, *, first: int = 0, quiet: bool = False
    ) -> None:
        """`first` units were done before; `quiet` shows neither a bar nor a line."""
        terminal = sys.stderr.isatty()
        self._name, self._unit, self._total, self._first, self.done = name, unit, total, first, first
        self._prints_lines = not (quiet or terminal)
        self._began = self._printed = time.monotonic()
        self._facts: Mapping[str, str] = {}
        hidden = quiet or not (unit and terminal)
        self._bar = tqdm(desc=name, initial=first, total=total, unit=f" {unit}", disable=hidden)
        self._ended = threading.Event()
        self._printer: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._active.append(self)
        if self._prints_lines and SAY_EVERY_SECONDS:
            self._printer = threading.Thread(target=self._print_regularly, name="progress", daemon=True)
            self._printer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._printer is not None:
            self._printer.join()
        self._active.remove(self)
        self._bar.close()

    def update(self, count: int = 1, facts: Mapping[str, str] | None = None, total: int | None = None) -> None:
        """Counts what was done; `facts` are shown instead of the rate, and `total` is what is expected by now."""
        self.done += count
        if total is not None:
            self._total = self._bar.total = total
        if facts is not None:
            self._facts = facts
            self._bar.set_postfix(facts, refresh=False)
        self._bar.update(count)
        self._print_if_due()

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items, each counted when the next is asked for."""
        with self:
            for item in items:
                yield item
                self.update()

    def write(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def line(self) -> str:
        """Returns the line to print now: how much of how much, how fast, and the time left."""
        seconds = time.monotonic() - self._began
        if not self._unit:
            return f"{self._name}, {tqdm.format_interval(seconds)} so far"
        done = self.done - self._first
        rate = done / seconds if seconds else 0.0
        speed = f"{rate:,.1f} {self._unit}/s" if rate >= 1 else f"{60 * rate:,.1f} {self._unit}/min"
        facts = [f"{name} {value}" for name, value in self._facts.items()] or [speed]
        whole = ""
        if self._total is not None:
            whole = f" of {self._total:,}"
            facts += [f"{tqdm.format_interval((self._total - self.done) / rate)} left"] if rate else []
        return f"{self._name}, {self.done:,}{whole} {self._unit}: {', '.join(facts)}"

    def _print_regularly(self) -> None:
        while not self._ended.wait(SAY_EVERY_SECONDS):
            self._print_if_due()

    def _print_if_due(self) -> None:
        now = time.monotonic()
        # A little early counts: the thread's clock and this one differ by microseconds.
        if self._prints_lines and self._active[-1:] == [self] and now - self._printed >= 0.99 * SAY_EVERY_SECONDS:
            self._printed = now
            print(self.line(), file=sys.stderr, flush=True)

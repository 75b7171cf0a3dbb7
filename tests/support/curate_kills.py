"""Kills a curation step at random moments and restarts it: it must end with the same bytes.

`python -m tests.support.curate_kills` forks a process for each line of its input, `[[ARGUMENTS…], SECONDS]`, and prints
its exit code. The process is `care curate ARGUMENTS…`, which the kernel kills after SECONDS of work (0: never), without
a chance to clean up.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from models.curation import command, frame

BLOCK = 16
"""Rows that a step takes together: few, so that a kill meets many blocks."""
SAVE_EVERY_ROWS = 7
LIMIT_SECONDS = 300.0
STEPS = ("audit", "benchmark", "dedup", "diversify", "hyde", "match")  # they import the others
Run = Callable[..., int]
"""Runs a step with its arguments and seconds until its kill; the exit code, negative for the signal that killed it."""


@contextmanager
def forks() -> Iterator[Run]:
    """The libraries are imported once, not for every kill."""
    given = [sys.executable, "-m", "tests.support.curate_kills"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(given, **pipes, text=True, start_new_session=True) as server:

        def run(arguments: Sequence[str], seconds: float = 0.0) -> int:
            print(json.dumps([arguments, seconds]), file=server.stdin, flush=True)
            assert select.select([server.stdout], [], [], LIMIT_SECONDS)[0], f"{arguments} does not end"
            return int(server.stdout.readline())

        try:
            assert run(["--help"]) == 0  # answered after the imports, which are not part of a step's work
            yield run
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def run_killed(run: Run, arguments: Sequence[str], kills: int, work_seconds: float, seed: int) -> int:
    """Restarts the step until it was killed `kills` times, then lets it end; returns the number of starts."""
    chance, killed, started = random.Random(seed), 0, 0
    while killed < kills and started < 10 * kills:
        started += 1
        code = run(arguments, max(1e-4, chance.uniform(0, 0.8 * work_seconds)))
        assert code in (0, -signal.SIGALRM), code
        killed += code != 0
        if not code:  # it ended before the kill: start again, and kill it sooner
            work_seconds /= 2
            Path(arguments[arguments.index("--out") + 1]).unlink()
    assert killed == kills
    assert run(arguments) == 0
    return started


def timed(run: Run, arguments: Sequence[str]) -> float:
    """Returns the seconds of an undisturbed run."""
    began = time.monotonic()
    assert run(arguments) == 0
    return time.monotonic() - began


def main() -> None:
    for step in STEPS:
        import_module(f"models.curation.{step}")
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            os.dup2(2, 1)  # the parent's output is for exit codes
            os._exit(work(*json.loads(line)))  # a plain exit would free the libraries for longer than most steps work
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def work(arguments: Sequence[str], seconds: float) -> int:
    """Returns the exit code."""
    frame.SAVE_EVERY_ROWS = SAVE_EVERY_ROWS
    parser = ArgumentParser()
    command.add_arguments(parser)
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    step = type(parsed.make(parsed))  # imports the step's libraries before the clock starts
    step.block = min(step.block, BLOCK)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    command.run(parsed)
    return 0


if __name__ == "__main__":
    main()

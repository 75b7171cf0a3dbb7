"""Kills a curation step at random moments and restarts it: it must end with the same bytes.

`python -m tests.support.curate_kills SECONDS SAVE_EVERY ARGUMENTS…` is `care curate ARGUMENTS…` in a process that the
kernel kills after SECONDS of work (0: never), without a chance to clean up.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from models.curation import command, frame

LIMIT_SECONDS = 300.0
BLOCK = 16
"""Rows that a step takes together: few, so that a kill meets many blocks."""


def run(arguments: Sequence[str], seconds: float = 0.0, save_every: int = 7) -> int:
    """Runs one process; returns its exit code, which is negative for the signal that killed it."""
    given = [sys.executable, "-m", "tests.support.curate_kills", str(seconds), str(save_every), *arguments]
    return subprocess.run(given, capture_output=True, check=False, timeout=LIMIT_SECONDS).returncode


def run_killed(arguments: Sequence[str], kills: int, work_seconds: float, seed: int) -> int:
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


def timed(arguments: Sequence[str]) -> float:
    """Returns the seconds of work of an undisturbed run, without the start of its process."""
    began = time.monotonic()
    assert run(["--help"]) == 0
    start = time.monotonic() - began
    began = time.monotonic()
    assert run(arguments) == 0
    return max(0.05, time.monotonic() - began - start)


def main() -> None:
    seconds, save_every, *arguments = sys.argv[1:]
    frame.SAVE_EVERY_ROWS = int(save_every)
    parser = ArgumentParser()
    command.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    step = type(parsed.make(parsed))  # imports the step's libraries before the clock starts
    step.block = min(step.block, BLOCK)
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    command.run(parsed)


if __name__ == "__main__":
    main()

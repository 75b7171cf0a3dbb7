"""Frame of every measuring program: arguments, common facts, exit status, figures and Markdown tables."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from loadtest.harness import BenchError
from loadtest.harness.generator import Measurement
from loadtest.harness.machine import commit, machine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Program(argparse.ArgumentParser):
    """A measuring program, started by `python -m MODULE`; its messages on standard error begin with `name`."""

    def __init__(self, name: str, module: str, description: str | None) -> None:
        super().__init__(prog=module, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._name = name

    def run(self, arguments: Sequence[str] | None, work: Callable[[argparse.Namespace, dict[str, str]], int]) -> int:
        """Runs `work` with the parsed arguments and the facts that all reports have; returns the exit status."""
        options = self.parse_args(arguments)
        command = shlex.join(["python", "-m", self.prog, *(sys.argv[1:] if arguments is None else arguments)])
        facts = {"command": f"`{command}`", "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        try:
            return work(options, facts | {"machine": machine()})
        except BenchError as error:
            say(f"{self._name}: {error}")
            return 1
        except KeyboardInterrupt:
            return 130


def say(message: str) -> None:
    """Prints a line of progress."""
    print(message, file=sys.stderr, flush=True)


def publish(text: str, report: DataclassInstance, file: Path | None) -> None:
    """Prints the text, then writes the report as JSON if there is a file for it."""
    print(text, flush=True)
    if file is None:
        return
    try:
        file.write_text(json.dumps(asdict(report), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {file}: cannot be written ({error.strerror}); the figures are above") from error


def exit_with(main: Callable[[], int]) -> None:
    """Ends this process with the status of `main`; SIGTERM unwinds it, so that the servers it started end too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of the figures of several rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.lowest:{form}}–{self.highest:{form}})"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        values = list(values)
        return cls(median(values), percentile(values, 0.99))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} / {self.p99:{form}}"


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(rounds: Sequence[Measurement]) -> tuple[Spread, list[float], dict[str, int]]:
    """Requests per second by round, the latencies of all requests, and all failures."""
    speed = Spread.of([one.requests_per_second for one in rounds])
    latencies = [value for one in rounds for value in one.latency_ms]
    return speed, latencies, dict(sum((Counter(one.failures) for one in rounds), Counter()))


def failures_text(failures: Mapping[Any, int]) -> str:
    return ", ".join(f"{number} × {reason}" for reason, number in failures.items()) or "0"


def markdown(facts: Mapping[str, str], *parts: str) -> str:
    """Returns the facts as a list, then tables and text; every part ends with an empty line."""
    return "\n".join([*(f"- {name}: {value}" for name, value in facts.items()), "", *parts])


def table(columns: str, rows: Iterable[str]) -> str:
    """Returns a Markdown table of cells separated by bars; the first column is aligned left, the others right."""
    rule = "|---" + "|---:" * columns.count("|") + "|"
    return "\n".join([f"| {columns} |", rule, *(f"| {row} |" for row in rows), ""])


def yes(met: bool) -> str:
    return "yes" if met else "no"

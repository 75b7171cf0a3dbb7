"""Runs Locust in steps, with more users every few seconds up to the knee, and draws latency against load.

    locust -f loadtest/steps.py --headless --only-summary --host http://127.0.0.1:8000 \
        --html var/loadtest/steps.html --picture var/loadtest/steps.png          (`make knee`)

The users are those of loadtest/locustfile.py. A step holds the load if the p95 of its searches is at most `--p95-ms`
and at most one request in a hundred is refused or fails. The knee is the last step before the first that does not,
which ends the run. Each step is a line on standard output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest.harness import above_zero, positive
from loadtest.harness.report import percentile
from loadtest.limits import REFUSED, SEARCH
from loadtest.locustfile import BulkProgram, Person, RagApplication

__all__ = ["BulkProgram", "Person", "RagApplication", "Steps"]  # Locust takes the users from this module

P95_MS = 250.0  # if --p95-ms is not given
MOST_REFUSED = 0.01
SIZE_INCHES = (6.4, 3.6)


@dataclass(slots=True)
class Step:
    """The answers of one step; latencies in milliseconds, of searches with one query."""

    users: int
    seconds: float
    latency_ms: list[float] = field(default_factory=list)
    requests: int = 0
    lost: int = 0

    def holds(self, p95_ms: float) -> bool:
        few = self.lost <= MOST_REFUSED * self.requests
        return few and bool(self.latency_ms) and percentile(self.latency_ms, 0.95) <= p95_ms

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds

    def __str__(self) -> str:
        shares = [f"{percentile(self.latency_ms, share):.0f}" for share in (0.5, 0.95, 0.99) if self.latency_ms]
        found = f"{self.users} users: {self.per_second:.1f} requests/s, p50 / p95 / p99 {' / '.join(shares) or '–'} ms"
        return f"{found}, refused or failed {self.lost}"


def knee(steps: Sequence[Step], p95_ms: float) -> Step | None:
    """Returns the last step before the first that does not hold; None if already the first does not."""
    held = list(takewhile(lambda step: step.holds(p95_ms), steps))
    return held[-1] if held else None


def draw(steps: Sequence[Step], p95_ms: float, file: Path) -> None:
    """Draws latency against load, with the limit and the knee."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=100, layout="tight")
    axes = figure.subplots()
    shown = [step for step in steps if step.latency_ms]
    for share in (0.5, 0.95, 0.99):
        times = [percentile(step.latency_ms, share) for step in shown]
        axes.plot([step.per_second for step in shown], times, marker=".", label=f"p{100 * share:.0f}")
    axes.axhline(p95_ms, color="grey", linewidth=0.8, linestyle=":", label=f"limit of p95, {p95_ms:g} ms")
    if (found := knee(steps, p95_ms)) is not None:
        axes.axvline(found.per_second, color="grey", linewidth=0.8, label=f"knee, {found.per_second:.0f} requests/s")
    axes.set(xlabel="requests/s", ylabel="latency, ms", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


_steps: list[Step] = []


class Steps(LoadTestShape):
    """`--step-users` more every `--step-seconds`, until a step does not hold or `--most-users`."""

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None  # Locust sets it before the first tick
        options = self.runner.environment.parsed_options
        assert options is not None  # the command line made this environment
        number = int(self.get_run_time() // options.step_seconds)  # type: ignore[no-untyped-call]
        users = options.step_users * (number + 1)
        if number >= len(_steps):
            if _steps:
                print(_steps[-1], flush=True)
            if users > options.most_users or (_steps and not _steps[-1].holds(options.p95_ms or P95_MS)):
                return None
            _steps.append(Step(users, options.step_seconds))
        return users, options.step_users


def add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--step-seconds", type=above_zero, default=15.0, help="length of a step")
    parser.add_argument("--step-users", type=positive, default=8, help="users that each step adds")
    parser.add_argument("--most-users", type=positive, default=400, help="the last step at the latest")
    parser.add_argument("--picture", default="", help="PNG file of latency against load")


def count(name: str, response_time: float, exception: BaseException | None, **_: object) -> None:
    if not _steps:
        return
    step = _steps[-1]
    step.requests += 1
    if exception is not None or name.startswith(REFUSED):
        step.lost += 1
    elif name.startswith(SEARCH):
        step.latency_ms.append(response_time)


def report(environment: Environment, **_: object) -> None:
    """Prints the knee and draws the picture."""
    options = environment.parsed_options
    if options is None or not _steps:
        return
    limit = options.p95_ms or P95_MS
    found = knee(_steps, limit)
    print(f"knee: {found}" if found is not None else f"knee: below {_steps[0]}", flush=True)
    if options.picture:
        draw(_steps, limit, Path(options.picture))


# Locust's events have no types.
events.init_command_line_parser.add_listener(add_arguments)  # type: ignore[no-untyped-call]
events.request.add_listener(count)  # type: ignore[no-untyped-call]
events.quitting.add_listener(report)  # type: ignore[no-untyped-call]

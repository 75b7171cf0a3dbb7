"""`make chaos`: injects faults under load, and counts failed requests, wrong answers and the time to recovery.

  python -m loadtest.lab.chaos                    every fault of faults.py, on services of the example corpus
  python -m loadtest.lab.chaos killed --times 3   only the faults whose name contains one of these words (`make kills`)

Connections ask without pause while the fault is there. For each fault, all times together:
- failed: requests without an answer or with one that is not 200, by reason.
- failing for: from the beginning of the fault to the end of the last failed request; the longest of the times.
- recovered after: from the end of the fault until the condition that the fault names holds; the longest of the times.
- wrong: answers that share less than half of their hits with the same query's ranking before the faults, answers that
  mix snapshots, and other statuses than the fault allows. Near ties may change places, because int8 vectors depend a
  little on the batch.
- hangs: requests that were not answered within ten seconds.

Exit status 1 if an answer was wrong, a request hung, a request failed where none may, or the service did not recover.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness import BenchError, positive
from loadtest.harness.report import Program, Quantiles, exit_with, failures_text, markdown, say, table
from loadtest.lab.crowd import Crowd, Event
from loadtest.lab.faults import Corpus, Fault, Processes, Stage
from loadtest.lab.machinery import Clock, Disk, Proxied

CONNECTIONS = 8
CALM_SECONDS = 2.0
AFTER_SECONDS = 2.0
BACK_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault, once: all requests, its time, and the seconds to recovery; None if it never came."""

    fault: Fault
    events: list[Event]
    at: float
    whole_seconds: float | None

    @property
    def failing_seconds(self) -> float:
        """From the beginning of the fault to the end of the last request that failed."""
        return max((event.ended - self.at for event in self.events if event.failure is not None), default=0.0)

    @property
    def is_sound(self) -> bool:
        bad = any(event.wrong or event.failure == "hang" for event in self.events)
        lost = not self.fault.may_fail and any(event.failure is not None for event in self.events)
        return self.whole_seconds is not None and not bad and not lost


def under_load(fault: Fault, crowd: Crowd) -> Trial:
    with crowd.asking(cache=fault.cached) as events:
        time.sleep(CALM_SECONDS)
        at = time.monotonic()
        own = list(fault.inject() or [])
        whole = wait_whole(fault, time.monotonic())
        time.sleep(AFTER_SECONDS)
    return Trial(fault, events + own, at, whole)


def wait_whole(fault: Fault, since: float) -> float | None:
    while time.monotonic() < since + BACK_SECONDS:
        if fault.is_whole():
            return time.monotonic() - since
        time.sleep(POLL_SECONDS)
    return None


def as_markdown(facts: dict[str, str], trials: Sequence[Trial]) -> str:
    columns = "fault | how | times | sent | failed | failing for | recovered after | wrong | hangs | median / p99 ms"
    names = dict.fromkeys(trial.fault.name for trial in trials)
    return markdown(facts, table(columns, [_row([one for one in trials if one.fault.name == name]) for name in names]))


def _row(trials: Sequence[Trial]) -> str:
    events, fault = [event for trial in trials for event in trial.events], trials[0].fault
    failures = Counter(event.failure for event in events if event.failure is not None)
    whole = [trial.whole_seconds for trial in trials if trial.whole_seconds is not None]
    back = f"{max(whole):.2f} s" if len(whole) == len(trials) else "never"
    failing, wrong = max(trial.failing_seconds for trial in trials), sum(event.wrong for event in events)
    latency = Quantiles.of(event.seconds * 1000 for event in events if event.failure is None)
    return (
        f"{fault.name} | {fault.how} | {len(trials)} | {len(events)} | {failures_text(failures)} | {failing:.2f} s | "
        f"{back} | {wrong} | {failures['hang']} | {latency:.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("chaos", "loadtest.lab.chaos", __doc__)
    program.add_argument("words", nargs="*", help="only the faults whose name contains one of these words")
    program.add_argument("--times", type=positive, default=1, help="how often each fault is injected (%(default)s)")
    program.add_argument("--documents", type=positive, help="of the example corpus (all)")
    program.add_argument("--connections", type=positive, default=CONNECTIONS, help="that ask meanwhile (%(default)s)")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="care-chaos-") as folder:
        trials = [trial for stage in stages(Path(folder), options.documents) for trial in _trials(stage, options)]
    if not trials:
        raise BenchError("no fault was injected; give words of the names in docs/reliability.md")
    facts |= {
        "service": "`care serve --workers 2` with an engine process and a Redis, no cache in the workers, unless noted",
        "load": f"{options.connections} connections, hybrid searches of the example corpus, one after another",
    }
    print(as_markdown(facts, trials))
    unsound = dict.fromkeys(trial.fault.name for trial in trials if not trial.is_sound)
    if unsound:
        say(f"chaos: not survived: {', '.join(unsound)}")
    return 1 if unsound else 0


def stages(folder: Path, documents: int | None) -> Iterator[Stage]:
    corpus = Corpus.build(folder, documents)
    for kind in (Processes, Disk, Clock, Proxied):
        yield kind(corpus, folder)


def _trials(stage: Stage, options: argparse.Namespace) -> Iterator[Trial]:
    words, times = options.words, options.times
    chosen = [fault for fault in stage.faults() if not words or any(word in fault.name for word in words)]
    if not chosen:
        return
    with stage.running(options.connections) as crowd:
        for fault in chosen:
            for number in range(times):
                say(f"chaos: {fault.name}, {number + 1} of {times}")
                trial = under_load(fault, crowd)
                say(f"chaos: {_row([trial])}")
                yield trial


if __name__ == "__main__":
    exit_with(main)

"""`make swaps`: swaps two snapshots under constant load, and checks that no request fails and no answer mixes versions.

  python -m loadtest.lab.swaps [--swaps 20] [--connections 8]

Two snapshots of the example corpus are built, with ids that begin with a- and b-. While connections ask without pause,
`care index publish` moves the pointer back and forth and `/admin/reload` makes the service follow at once. Every answer
names its snapshot; all its hits must be of that one. Exit status 1 if one is not, or if a request fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.harness import REPOSITORY, BenchError
from loadtest.harness.report import Program, exit_with, say
from loadtest.harness.servers import ADMIN_TOKEN, CORPUS, build_example, care, care_server, connect, exchange, running
from loadtest.lab.crowd import Body, Crowd, Event, ids_of

QUERIES = ("高血压吃什么药", "孩子发烧怎么办", "糖尿病饮食", "asthma inhaler", "骨折急救", "胃镜前准备")
# Single queries and batches.
REQUESTS = [{"query": [query, *QUERIES] if at % 4 == 0 else query} for at, query in enumerate(QUERIES * 2)]


def is_mixed(prefixes: Mapping[str, str], answer: Body) -> bool:
    """Whether an answer has no hit, or one of another snapshot than it names; `prefixes` are of its ids."""
    ids = ids_of(answer)
    return not ids or any(not name.startswith(prefixes[answer["snapshot"]]) for name in ids)


def run(swaps: int, connections: int) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="care-swaps-") as scratch:
        folder = Path(scratch)
        collection = folder / "collection"
        prefixes = _build_two(folder, collection)
        with running(care_server(collection), folder) as started:
            crowd = Crowd(started.url, connections, REQUESTS, lambda request, answer: is_mixed(prefixes, answer))
            with crowd.asking() as events:
                for version in itertools.islice(itertools.cycle(prefixes), swaps):
                    care("index", "publish", version, "--collection", collection)
                    _reload(started.url)
    return events


def _build_two(folder: Path, collection: Path) -> dict[str, str]:
    """Builds both versions; returns the prefix of each one's ids. The last one is served first."""
    prefixes: dict[str, str] = {}
    rows = [json.loads(line) for line in (REPOSITORY / CORPUS).read_text(encoding="utf-8").splitlines()]
    for prefix in ("a-", "b-"):
        corpus = folder / f"{prefix}corpus.jsonl"
        corpus.write_text("\n".join(json.dumps(row | {"_id": prefix + row["_id"]}) for row in rows), encoding="utf-8")
        build_example(collection, corpus, "--max-removed", "1")  # all ids change
        prefixes[(collection / "CURRENT").read_text().strip()] = prefix
    return prefixes


def _reload(url: str) -> None:
    with connect(url) as connection:
        status, body = exchange(connection, "POST", "/admin/reload", Authorization=f"Bearer {ADMIN_TOKEN}")
        if status != 200:
            raise BenchError(f"/admin/reload answered {status}: {body!r}")


def summarize(events: Sequence[Event], swaps: int, connections: int) -> tuple[str, bool]:
    """One line, and whether all is well: both snapshots answered, no request failed, no answer was mixed."""
    answers = Counter(event.snapshot for event in events if event.failure is None)
    failed, mixed = sum(event.failure is not None for event in events), sum(event.wrong for event in events)
    shares = " + ".join(map(str, answers.values()))
    text = (
        f"{swaps} swaps, {connections} connections: {shares} answers of the two snapshots, "
        f"{failed} failed requests, {mixed} mixed answers"
    )
    return text, not failed and not mixed and len(answers) >= 2


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("swaps", "loadtest.lab.swaps", __doc__)
    program.add_argument("--swaps", type=int, default=20)
    program.add_argument("--connections", type=int, default=8)
    return program.run(arguments, _run)


def _run(given: argparse.Namespace, facts: dict[str, str]) -> int:
    events = run(given.swaps, given.connections)
    text, sound = summarize(events, given.swaps, given.connections)
    print(text)
    for event in [event for event in events if event.failure is not None][:5]:
        say(str(event.failure))
    return 0 if sound else 1


if __name__ == "__main__":
    exit_with(main)

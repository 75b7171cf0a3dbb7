"""Swaps between two snapshots under constant load: does a request fail, does an answer mix versions?

  python -m loadtest.lab.swaps [--swaps 20] [--connections 8]

Two snapshots of the example corpus are built, with ids that begin with a- and b-. While connections ask without pause,
`care index publish` moves the pointer back and forth and `/admin/reload` makes the service follow at once. Every answer
names its snapshot; all its hits must be of that one. Exit status 1 if one is not, or if a request fails.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.harness.client import REPOSITORY
from loadtest.harness.http1 import HOST, port_of
from loadtest.harness.processes import ADMIN_TOKEN, CORPUS, build_example, care_index, service

QUERIES = ("高血压吃什么药", "孩子发烧怎么办", "糖尿病饮食", "asthma inhaler", "骨折急救", "胃镜前准备")
TIMEOUT_SECONDS = 30


@dataclass
class Tally:
    """What the connections saw."""

    answers: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    mixed: int = 0

    def add(self, status: int, body: bytes, letters: dict[str, str]) -> None:
        if status != 200:
            self.failures.append(f"status {status}")
            return
        answer = json.loads(body)
        version = answer["snapshot"]
        ids = [hit["id"] for result in answer["results"] for hit in result["hits"]]
        self.answers[version] = self.answers.get(version, 0) + 1
        self.mixed += not ids or any(not name.startswith(letters[version]) for name in ids)


def ask(url: str, stop: threading.Event, tally: Tally, letters: dict[str, str], first: int) -> None:
    """One connection: single queries and batches in turn until told to stop."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=TIMEOUT_SECONDS)) as connection:
        for turn in itertools.count(first):
            if stop.is_set():
                return
            query = QUERIES[turn % len(QUERIES)]
            body = json.dumps({"query": [query, *QUERIES] if turn % 4 == 0 else query})
            try:
                connection.request("POST", "/v1/search", body)
                answer = connection.getresponse()
                tally.add(answer.status, answer.read(), letters)
            except (OSError, http.client.HTTPException) as error:
                tally.failures.append(repr(error))
                connection.close()


def run(swaps: int, connections: int) -> Tally:
    with tempfile.TemporaryDirectory(prefix="care-swaps-") as scratch:
        folder = Path(scratch)
        letters = _build_two(folder)
        tallies = [Tally() for _ in range(connections)]
        stop = threading.Event()
        with service(folder / "collection", folder) as url:
            threads = [
                threading.Thread(target=ask, args=(url, stop, tally, letters, number))
                for number, tally in enumerate(tallies)
            ]
            for thread in threads:
                thread.start()
            for version in itertools.islice(itertools.cycle(letters), swaps):
                care_index("publish", version, "--collection", str(folder / "collection"))
                _reload(url)
            stop.set()
            for thread in threads:
                thread.join()
    whole = Tally()
    for tally in tallies:
        whole.failures += tally.failures
        whole.mixed += tally.mixed
        for version, count in tally.answers.items():
            whole.answers[version] = whole.answers.get(version, 0) + count
    return whole


def _build_two(folder: Path) -> dict[str, str]:
    """Version → first letters of its ids; the last one built is served first."""
    letters: dict[str, str] = {}
    rows = [json.loads(line) for line in (REPOSITORY / CORPUS).read_text(encoding="utf-8").splitlines()]
    for prefix in ("a-", "b-"):
        corpus = folder / f"{prefix}corpus.jsonl"
        corpus.write_text("\n".join(json.dumps(row | {"_id": prefix + row["_id"]}) for row in rows), encoding="utf-8")
        build_example(folder / "collection", corpus, "--max-removed", "1")  # every id is another one
        letters[(folder / "collection" / "CURRENT").read_text().strip()] = prefix
    return letters


def _reload(url: str) -> None:
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=TIMEOUT_SECONDS)) as connection:
        connection.request("POST", "/admin/reload", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"/admin/reload answered {answer.status}: {body!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--connections", type=int, default=8)
    arguments = parser.parse_args()
    tally = run(arguments.swaps, arguments.connections)
    shares = " + ".join(str(count) for count in tally.answers.values())
    print(
        f"{arguments.swaps} swaps, {arguments.connections} connections: {shares} answers of the two snapshots, "
        f"{len(tally.failures)} failed requests, {tally.mixed} mixed answers"
    )
    for failure in tally.failures[:5]:
        print(failure, file=sys.stderr)
    return 1 if tally.failures or tally.mixed or len(tally.answers) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())

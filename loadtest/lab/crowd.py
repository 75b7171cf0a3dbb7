"""Clients that search without pause and check every response, also while the service is killed or swapped."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from loadtest.harness import PATH, BenchError
from loadtest.harness.servers import connect, exchange

# Requests over one connection before it is opened again, so that a new worker gets its share.
RENEWED = 20
# An answer that takes longer is a hang.
HANG_SECONDS = 10.0
# A client that retries waits a little; without this a service that refuses would be asked as fast as it refuses.
PAUSE_SECONDS = 0.02

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One request: when it ended and how long it took, in seconds; why it failed, or whether its answer was wrong."""

    ended: float
    seconds: float
    failure: str | None
    wrong: bool = False
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Connections to one service that send `requests` in turn; `is_wrong` judges a request and its answer."""

    url: str
    connections: int
    requests: Sequence[Body]
    is_wrong: Callable[[Body, Body], bool]

    @contextlib.contextmanager
    def asking(self, **options: object) -> Iterator[list[Event]]:
        """Asks while the block runs; the list is complete after it. `options` are added to every request."""
        events: list[Event] = []
        over = threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(number, options, over, events))
            for number in range(self.connections)
        ]
        for thread in threads:
            thread.start()
        try:
            yield events
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _ask(self, first: int, options: dict[str, object], over: threading.Event, events: list[Event]) -> None:
        with connect(self.url, HANG_SECONDS) as connection:
            for turn in count(1):
                if over.is_set():
                    return
                request = self.requests[(first + turn * self.connections) % len(self.requests)]
                event = self._ask_once(connection, {**request, **options})
                events.append(event)
                if event.failure is not None:
                    time.sleep(PAUSE_SECONDS)
                if event.failure is not None or turn % RENEWED == 0:
                    connection.close()  # the next request opens it again

    def _ask_once(self, connection: http.client.HTTPConnection, request: Body) -> Event:
        began = time.monotonic()
        failure, wrong, snapshot = None, False, ""
        try:
            status, content = exchange(connection, "POST", PATH, request)
            if status == 200:
                answer = json.loads(content)
                wrong, snapshot = self.is_wrong(request, answer), answer.get("snapshot", "")
            else:
                failure = f"status {status}"
        except TimeoutError:
            failure = "hang"
        except (OSError, http.client.HTTPException):
            failure = "connection lost"
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong = True
        ended = time.monotonic()
        return Event(ended, ended - began, failure, wrong, snapshot)


def ids_of(answer: Body) -> list[str]:
    """Returns the ids of all hits of all results."""
    return [str(hit["id"]) for result in answer["results"] for hit in result["hits"]]


def learn_rankings(url: str, queries: Sequence[str]) -> dict[str, list[str]]:
    """Returns the ids that each query gets now; queries without hits are left out."""
    known: dict[str, list[str]] = {}
    with connect(url) as connection:
        for query in queries:
            status, content = exchange(connection, "POST", PATH, {"query": query, "cache": False})
            if status != 200:
                raise BenchError(f"the service answered {status} before any fault")
            if ids := ids_of(json.loads(content)):
                known[query] = ids
    return known


def is_wrong(ids: Collection[str], expected: Collection[str]) -> bool:
    """Returns whether an answer shares less than half of its hits with the known ranking."""
    return 2 * len(set(ids) & set(expected)) < len(expected)


def checking_crowd(
    url: str, connections: int, rankings: Mapping[str, Sequence[str]], prefixes: Mapping[str, str] | None = None
) -> Crowd:
    """Asks single queries and, every eighth time, a batch of four; compares answers with the rankings.

    With `prefixes`, all ids of an answer begin with that of the snapshot which it names; rankings are without them.
    """
    queries = list(rankings)
    requests = [{"query": queries[at - 3 : at + 1] if at % 8 == 7 else query} for at, query in enumerate(queries)]

    def judge(asked: Body, answer: Body) -> bool:
        ids, prefix = ids_of(answer), prefixes[answer["snapshot"]] if prefixes else ""
        named = [asked["query"]] if isinstance(asked["query"], str) else asked["query"]
        expected = {id for query in named for id in rankings[query]}
        mixed = any(not id.startswith(prefix) for id in ids)
        return mixed or is_wrong([id.removeprefix(prefix) for id in ids], expected)

    return Crowd(url, connections, requests, judge)

"""Connections that ask without pause and keep every answer's fate, whatever happens to the service meanwhile.

A connection that breaks is opened again, and each of them now and then, so that a new worker gets its share. Knows
what each query's ranking was in peace, and nothing of what is done to the service.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from loadtest.harness.client import PATH
from loadtest.harness.errors import BenchError
from loadtest.harness.http1 import HOST, port_of

# Requests over one connection before it is opened anew.
RENEWED = 20
# Longer than this is a hang.
HANG_SECONDS = 10.0
# A service that refuses at once would be asked as fast as it refuses; a client that retries waits a little.
PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Event:
    """One request: when it ended and how long it took, in seconds; why it failed, or whether its answer was wrong."""

    ended: float
    seconds: float
    failure: str | None
    wrong: bool = False


class Crowd:
    """So many connections to one service; `rankings` are the ids that each query is known to get."""

    def __init__(self, url: str, connections: int, rankings: Mapping[str, Sequence[str]]) -> None:
        self._port = port_of(url)
        self._connections = connections
        self._rankings = rankings
        self._queries = list(rankings)

    @contextlib.contextmanager
    def asking(self, *, cached: bool) -> Iterator[list[Event]]:
        """Asks while the block runs; the list is complete after it. `cached` lets the service answer from a cache."""
        events: list[Event] = []
        over = threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(number, cached, over, events))
            for number in range(self._connections)
        ]
        for thread in threads:
            thread.start()
        try:
            yield events
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _ask(self, first: int, cached: bool, over: threading.Event, events: list[Event]) -> None:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=HANG_SECONDS)
        with contextlib.closing(connection):
            for turn in count(1):
                if over.is_set():
                    return
                query = self._queries[(first + turn * self._connections) % len(self._queries)]
                event = self._ask_once(connection, query, cached)
                events.append(event)
                if event.failure is not None:
                    time.sleep(PAUSE_SECONDS)
                if event.failure is not None or turn % RENEWED == 0:
                    connection.close()  # the next request opens it again

    def _ask_once(self, connection: http.client.HTTPConnection, query: str, cached: bool) -> Event:
        began = time.monotonic()
        failure, wrong = None, False
        try:
            status, ids = search(connection, query, cached)
            failure = None if status == 200 else f"status {status}"
            wrong = status == 200 and is_wrong(ids, self._rankings[query])
        except TimeoutError:
            failure = "hang"
        except (OSError, http.client.HTTPException):
            failure = "connection lost"
        except (ValueError, KeyError, TypeError):
            wrong = True
        ended = time.monotonic()
        return Event(ended, ended - began, failure, wrong)


def search(connection: http.client.HTTPConnection, query: str, cached: bool) -> tuple[int, list[str]]:
    """Status and ids of one search."""
    connection.request("POST", PATH, json.dumps({"query": query, "cache": cached}))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        return answer.status, []
    return 200, [str(hit["id"]) for hit in json.loads(content)["results"][0]["hits"]]


def is_wrong(ids: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether an answer shares less than half of its hits with the ranking that is known."""
    return 2 * len(set(ids) & set(expected)) < len(expected)


def learn_rankings(url: str, queries: Sequence[str]) -> dict[str, list[str]]:
    """What each query gets in peace; queries without hits are left out."""
    known: dict[str, list[str]] = {}
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=HANG_SECONDS)) as connection:
        for query in queries:
            status, ids = search(connection, query, cached=False)
            if status != 200:
                raise BenchError(f"the service answered {status} in peace")
            if ids:
                known[query] = ids
    return known

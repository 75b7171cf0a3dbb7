"""Locust users of three kinds: RAG applications in bursts, people at the search page, bulk programs.

    locust -f loadtest/locustfile.py --headless -u 16 -r 16 -t 20s --host http://127.0.0.1:8000 --p95-ms 250

Arrivals are open: a user that waited for a slow answer asks its next questions sooner, so a slow service does not slow
its own load down. Queries repeat by Zipf's law. Every answer is checked, not only its status. An answer of 429 is not a
failure: it is counted as `refused`, and the user waits as long as Retry-After says. At the end the run is compared with
the limits (loadtest/limits.py): one line, and exit status 1 if a limit is exceeded or no search was made.
loadtest/steps.py raises the load in steps.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from gevent import joinall, spawn
from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtest import answers
from loadtest.harness import PATH, QUERIES, BadQueries, above_zero, share
from loadtest.limits import verdict

T = TypeVar("T")

REFUSED = "refused (429)"
MODES, MODE_WEIGHTS = ("hybrid", "dense", "lexical"), (6, 3, 1)
TOP_K, TOP_K_WEIGHTS = (10, 5, 20, 50), (6, 2, 1, 1)
BATCH = (2, 16)
BURST, BURST_WEIGHTS = (1, 2, 3, 4), (5, 2, 2, 1)

_queries: list[str] = []
_cumulated: list[float] = []


def add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--queries", default=str(QUERIES), help="JSON lines of {text}; each must have an answer")
    parser.add_argument("--p95-ms", type=above_zero, help="most milliseconds for 95 %% of each kind of search")
    parser.add_argument("--p99-ms", type=above_zero, help="most milliseconds for 99 %% of each kind of search")
    parser.add_argument("--errors", type=share, default=0.0, help="largest share of failures")
    parser.add_argument("--refused", type=share, default=0.0, help="largest share of answers of 429")


def load_queries(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None  # the command line made this environment
    try:
        _queries[:] = answers.read_queries(Path(environment.parsed_options.queries))
    except BadQueries as error:
        sys.exit(str(error))
    _cumulated[:] = accumulate(1 / rank for rank in range(1, len(_queries) + 1))


def await_last_write(environment: Environment, **_: object) -> None:
    """Waits for Locust's CSV files: they are written every second, not at the end."""
    time.sleep(CSV_STATS_INTERVAL_SEC * 1.5)


def apply_limits(environment: Environment, **_: object) -> None:
    """Prints the verdict in one line; a limit that is exceeded sets the exit status."""
    options = environment.parsed_options
    if options is None or isinstance(environment.runner, WorkerRunner):
        return
    met, text = verdict(environment.stats.entries.values(), options)
    if not met:
        environment.process_exit_code = 1
    print(text, file=sys.stdout if met else sys.stderr, flush=True)


# Locust's events have no types.
events.init_command_line_parser.add_listener(add_arguments)  # type: ignore[no-untyped-call]
events.init.add_listener(load_queries)  # type: ignore[no-untyped-call]
events.test_stop.add_listener(await_last_write)  # type: ignore[no-untyped-call]
events.quitting.add_listener(apply_limits)  # type: ignore[no-untyped-call]


def some_queries(number: int) -> list[str]:
    """Queries by Zipf's law: the first is asked twice as often as the second, three times as often as the third."""
    return random.choices(_queries, cum_weights=_cumulated, k=number)


def one_query() -> str:
    return some_queries(1)[0]


class CareUser(FastHttpUser):
    """A client that begins a task every 1 / `rate` seconds on average, at random, however long the last one took."""

    abstract = True
    rate = 4.0
    _due: float | None = None

    def wait_time(self) -> float:
        now = time.monotonic()
        self._due = (now if self._due is None else self._due) + random.expovariate(self.rate)
        return max(0.0, self._due - now)

    def ask(
        self, method: str, path: str, check: Callable[[bytes], T], *, name: str, body: dict[str, Any] | None = None
    ) -> T | None:
        """The result of `check` on the answer; None if there was none, which is counted under `name`."""
        found, pause = None, 0.0
        with self.client.request(method, path, name=name, json=body, catch_response=True) as response:
            if response.status_code == 429:
                response.request_meta["name"] = REFUSED
                response.success()
                pause = float((response.headers or {}).get("Retry-After", 1))
            elif response.status_code == 200:
                try:
                    found = check(response.content or b"")
                except answers.BadAnswer as error:
                    response.failure(str(error))
        time.sleep(pause)  # Locust pauses this user only
        return found

    def search(self, name: str, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
        return self.ask("POST", PATH, partial(answers.check_search, body), name=name, body=body) or []


class RagApplication(CareUser):
    """A RAG application: for each question a burst of searches at the same time, most often one."""

    weight = 12
    rate = 2.0

    def on_start(self) -> None:
        facets = self.ask("GET", "/v1/collection", answers.check_collection, name="collection") or {}
        self._conditions = [{"field": field, "eq": value} for field, values in facets.items() for value in values]

    @task
    def question(self) -> None:
        (size,) = random.choices(BURST, BURST_WEIGHTS)
        joinall([spawn(ask) for ask in random.choices((self.post, self.get, self.filtered), (6, 2, 2), k=size)])

    def post(self) -> None:
        (mode,) = random.choices(MODES, MODE_WEIGHTS)
        (top_k,) = random.choices(TOP_K, TOP_K_WEIGHTS)
        self.search(f"search {mode}", {"query": one_query(), "top_k": top_k, "mode": mode})

    def get(self) -> None:
        body = {"query": one_query(), "top_k": 10}
        path = f"{PATH}?{urlencode({'q': body['query'], 'top_k': body['top_k']})}"
        self.ask("GET", path, partial(answers.check_search, body), name="search by URL")

    def filtered(self) -> None:
        body = {"query": one_query(), "top_k": 10, "mode": "dense"}
        conditions = [random.choice(self._conditions)] if self._conditions else []
        self.search("search filtered", body | {"filters": conditions})


class BulkProgram(CareUser):
    """A program that sends many queries in one request, which others may overtake."""

    weight = 1
    rate = 0.5

    @task
    def batch(self) -> None:
        queries = some_queries(random.randint(*BATCH))
        body = {"query": queries, "top_k": 10, "mode": "hybrid", "fields": ["title", "text"], "bulk": True}
        self.search("batch", body)


class Person(CareUser):
    """A person at the page: loads it once with its files, then searches and opens a hit."""

    weight = 3
    rate = 0.5

    def on_start(self) -> None:
        for path in self.ask("GET", "/", answers.check_page, name="page") or []:
            self.ask("GET", path, answers.check_file, name="page's files")
        self.ask("GET", "/v1/collection", answers.check_collection, name="collection")

    @task
    def look_up(self) -> None:
        for hits in self.search("search hybrid", {"query": one_query(), "top_k": 10, "mode": "hybrid"}):
            id = str(random.choice(hits)["id"])
            path = f"/v1/documents/{quote(id, safe='')}"
            self.ask("GET", path, partial(answers.check_document, id), name="document")

"""Users of the search service, for Locust: programs with one query, programs with many, people at the page.

    locust -f loadtest/locustfile.py --headless -u 16 -r 16 -t 20s --host http://127.0.0.1:8000 --p95-ms 250

Every answer is checked, not only its status. An answer of 429 is not a failure: it is counted as `refused`, and the
user waits as long as Retry-After says. At the end the run is compared with the limits (loadtest/limits.py): one line,
and exit status 1 if a limit is exceeded or no search was made.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtest import answers
from loadtest.harness import PATH, REPOSITORY, BadQueries
from loadtest.limits import verdict

T = TypeVar("T")

QUERIES = REPOSITORY / "examples" / "queries.jsonl"
REFUSED = "refused (429)"
MODES, MODE_WEIGHTS = ("hybrid", "dense", "lexical"), (6, 3, 1)
TOP_K, TOP_K_WEIGHTS = (10, 5, 20, 50), (6, 2, 1, 1)
BATCH = (2, 16)

_queries: list[str] = []


def add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--queries", default=str(QUERIES), help="JSON lines of {text}; each must have an answer")
    parser.add_argument("--p95-ms", type=float, help="most milliseconds for 95 %% of each kind of search")
    parser.add_argument("--p99-ms", type=float, help="most milliseconds for 99 %% of each kind of search")
    parser.add_argument("--errors", type=float, default=0.0, help="largest share of failures")
    parser.add_argument("--refused", type=float, default=0.0, help="largest share of answers of 429")


def load_queries(environment: Environment, **_: object) -> None:
    assert environment.parsed_options is not None  # the command line made this environment
    try:
        _queries[:] = answers.read_queries(Path(environment.parsed_options.queries))
    except BadQueries as error:
        sys.exit(str(error))


def await_last_write(environment: Environment, **_: object) -> None:
    """Waits for Locust's CSV files: they are written every second, not at the end."""
    time.sleep(CSV_STATS_INTERVAL_SEC * 1.5)


def apply_limits(environment: Environment, **_: object) -> None:
    """Prints the verdict in one line; a limit that is exceeded sets the exit status."""
    given = environment.parsed_options
    if given is None or isinstance(environment.runner, WorkerRunner):
        return
    met, text = verdict(environment.stats.entries.values(), given)
    if not met:
        environment.process_exit_code = 1
    print(text, file=sys.stdout if met else sys.stderr, flush=True)


# Locust's events have no types.
events.init_command_line_parser.add_listener(add_arguments)  # type: ignore[no-untyped-call]
events.init.add_listener(load_queries)  # type: ignore[no-untyped-call]
events.test_stop.add_listener(await_last_write)  # type: ignore[no-untyped-call]
events.quitting.add_listener(apply_limits)  # type: ignore[no-untyped-call]


class CareUser(FastHttpUser):
    """A client with random pauses of 1 / `rate` seconds on average."""

    abstract = True
    rate = 4.0

    def wait_time(self) -> float:
        return random.expovariate(self.rate)

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


class OneQuery(CareUser):
    """A program with one query at a time: the traffic of a RAG application."""

    weight = 12

    def on_start(self) -> None:
        facets = self.ask("GET", "/v1/collection", answers.check_collection, name="collection") or {}
        self._conditions = [{"field": field, "eq": value} for field, values in facets.items() for value in values]

    @task(6)
    def post(self) -> None:
        (mode,) = random.choices(MODES, MODE_WEIGHTS)
        (top_k,) = random.choices(TOP_K, TOP_K_WEIGHTS)
        self.search(f"search {mode}", {"query": random.choice(_queries), "top_k": top_k, "mode": mode})

    @task(2)
    def get(self) -> None:
        body = {"query": random.choice(_queries), "top_k": 10}
        path = f"{PATH}?{urlencode({'q': body['query'], 'top_k': body['top_k']})}"
        self.ask("GET", path, partial(answers.check_search, body), name="search by URL")

    @task(2)
    def filtered(self) -> None:
        body = {"query": random.choice(_queries), "top_k": 10, "mode": "dense"}
        conditions = [random.choice(self._conditions)] if self._conditions else []
        self.search("search filtered", body | {"filters": conditions})


class ManyQueries(CareUser):
    """A program that sends many queries in one request."""

    weight = 1
    rate = 0.5

    @task
    def batch(self) -> None:
        queries = random.choices(_queries, k=random.randint(*BATCH))
        self.search("batch", {"query": queries, "top_k": 10, "mode": "hybrid", "fields": ["title", "text"]})


class Visitor(CareUser):
    """A person at the page: loads it once with its files, then searches and opens a hit."""

    weight = 3
    rate = 0.5

    def on_start(self) -> None:
        for path in self.ask("GET", "/", answers.check_page, name="page") or []:
            self.ask("GET", path, answers.check_file, name="page's files")
        self.ask("GET", "/v1/collection", answers.check_collection, name="collection")

    @task
    def look_up(self) -> None:
        for hits in self.search("search hybrid", {"query": random.choice(_queries), "top_k": 10, "mode": "hybrid"}):
            id = str(random.choice(hits)["id"])
            path = f"/v1/documents/{quote(id, safe='')}"
            self.ask("GET", path, partial(answers.check_document, id), name="document")

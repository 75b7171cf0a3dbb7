"""Prometheus metrics of one app in its own registry, and the stage timings of a request.

Label values are bounded: routes are templates, never paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from platform import python_version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from models.package import care_version

if TYPE_CHECKING:
    from service.engine.jobs import BatchTimes

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Folder in which several processes keep their metrics; prometheus_client reads it when it is imported.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
ACCESS_LOGGER = "service.access"


@dataclass(slots=True)
class Timings:
    """Seconds per stage of one request; header, answer and metrics show the same numbers.

    `queue` is the wait for the engine less the time of the request's own batches, so the stages add up to `total`.
    """

    tokenize: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    search: float = 0.0
    rerank: float = 0.0
    fetch: float = 0.0
    total: float = 0.0

    def add_engine(self, waited_seconds: float, batches: Iterable[BatchTimes]) -> None:
        """Splits the wait for the engine into stages; a batch that several queries shared counts once."""
        distinct = {id(times): times for times in batches}.values()
        # A query that joined a running batch waited only for its end, which is the search.
        self.search = min(waited_seconds, sum(times.search_seconds for times in distinct))
        self.encode = min(waited_seconds - self.search, sum(times.encode_seconds for times in distinct))
        self.queue = waited_seconds - self.search - self.encode

    def as_json(self) -> bytes:
        """Writes the answer's `timings_ms`: milliseconds, three decimals."""
        return _JSON % self._milliseconds()

    def as_server_timing(self) -> bytes:
        """Writes the Server-Timing header."""
        return _SERVER_TIMING % self._milliseconds()

    def _milliseconds(self) -> tuple[float, ...]:
        first = (1000 * self.tokenize, 1000 * self.queue, 1000 * self.encode)
        return (*first, 1000 * self.search, 1000 * self.rerank, 1000 * self.fetch, 1000 * self.total)


STAGES = tuple(stage.name for stage in fields(Timings))
_JSON = ("{" + ",".join(f'"{stage}":%.3f' for stage in STAGES) + "}").encode()
_SERVER_TIMING = ", ".join(f"{stage};dur=%.3f" for stage in STAGES).encode()


class Outcomes:
    """Counts by the values of one label; all are there from the start, at 0: Prometheus counts no step from nothing."""

    def __init__(self, counter: Counter, *values: str) -> None:
        self._counters = {value: counter.labels(value) for value in values}

    def __call__(self, value: str, count: int = 1) -> None:
        self._counters[value].inc(count)


class Metrics:
    """The metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry, multiprocess_mode="livemax")
        self._requests = counter("care_requests", "Requests by route and status.", ["route", "status"])
        self._request_seconds = histogram(
            "care_request_seconds", "Seconds from request to answer.", ["route"], buckets=SECONDS
        )
        in_flight = gauge("care_requests_in_flight", "Requests that are being answered.", multiprocess_mode="livesum")
        self.request_began, self.request_ended = in_flight.inc, in_flight.dec
        self._by_answer: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # labels() is slow
        stages = histogram("care_stage_seconds", "Seconds per stage of a search.", ["stage"], buckets=SECONDS)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._queries = counter("care_queries", "Queries answered; a request may hold many.")
        self._batch_size = histogram("care_batch_size", "Queries per batch of the engine.", buckets=SIZES)
        self._tokens = counter("care_tokens", "Tokens that encoders read.")
        self._engine_seconds = counter(
            "care_engine_seconds", "Seconds that engines spent on batches; its rate is their busy share."
        )
        self._queue = gauge("care_queue_length", "Queries that wait for the engine.", multiprocess_mode="livesum")
        self._queue_length: Callable[[], int] | None = None
        self.waiting = self._queue.set
        cache = counter("care_cache", "Look-ups by layer, kind and outcome.", ["layer", "kind", "outcome"])
        self._cache = {
            labels: cache.labels(*labels)
            for labels in product(("process", "redis"), ("result", "embedding"), ("hit", "miss", "bypass", "error"))
        }
        writes = counter("care_cache_writes", "Values for Redis by outcome.", ["outcome"])
        self.cache_write = Outcomes(writes, "written", "dropped", "error")
        hyde = counter("care_hyde", "Queries that asked for imagined documents.", ["outcome"])
        self.hyde = Outcomes(hyde, "used", "failed")
        rerank = counter("care_rerank", "Queries whose first hits were reranked, all or some in time.", ["outcome"])
        self.rerank = Outcomes(rerank, "complete", "partial")
        self._snapshot = gauge("care_snapshot_info", "1 for the snapshot that is served.", ["version"])
        self._served: str | None = None
        self._documents = gauge("care_snapshot_documents", "Documents in the served snapshot.")
        self._created = gauge("care_snapshot_created_timestamp_seconds", "When the served snapshot was built.")
        self.fresh = gauge("care_fresh_changes", "Documents posted or deleted since the served snapshot was built.").set
        self._swaps = counter("care_swaps", "Snapshots that were put into service, by each worker.")
        self.failed_swap = counter("care_failed_swaps", "Snapshots that were refused.").inc
        restarts = counter("care_restarts", "Processes that were started again because they had ended.", ["process"])
        self.restart = Outcomes(restarts, "worker", "engine")
        traces = counter("care_traces", "Requests traced, by whether the collector took them.", ["outcome"])
        self.traces = Outcomes(traces, "sent", "dropped")
        self._card_used = gauge(
            "care_card_memory_used_bytes", "Memory in use on the GPU, by all programs; 0 without one."
        )
        self._card_total = gauge("care_card_memory_bytes", "Memory of the GPU; 0 without one.")
        build = gauge("care_build_info", "1 for the version of the program.", ["version", "python"])
        build.labels(care_version(), python_version()).set(1)

    def request(self, route: str, status: int, seconds: float | None) -> None:
        """Counts a request; its latency is left out if `seconds` is None: it was refused before it was parsed."""
        known = self._by_answer.get((route, status))
        if known is None:
            known = self._requests.labels(route, status), self._request_seconds.labels(route)
            self._by_answer[route, status] = known
        known[0].inc()
        if seconds is not None:
            known[1].observe(seconds)

    def search(self, queries: int, timings: Timings) -> None:
        """Counts an answered search; stages that it skipped are not observed."""
        self._queries.inc(queries)
        for stage, histogram in self._stages.items():
            if seconds := getattr(timings, stage):
                histogram.observe(seconds)

    def batch(self, size: int, tokens: int, seconds: float, waiting: int) -> None:
        """Counts a computed batch; `tokens` were encoded for it, `waiting` queries were in the queue."""
        self._batch_size.observe(size)
        self._tokens.inc(tokens)
        self._engine_seconds.inc(seconds)
        self._queue.set(waiting)

    def cache(self, layer: str, kind: str, outcome: str, count: int) -> None:
        self._cache[layer, kind, outcome].inc(count)

    def swap(self, version: str, documents: int, created_seconds: float) -> None:
        """Names the served snapshot; it was built at `created_seconds` since 1970."""
        # Set to 0 instead of removed: metrics shared by several processes cannot be removed.
        if self._served is not None:
            self._snapshot.labels(self._served).set(0)
        self._served = version
        self._snapshot.labels(version).set(1)
        self._documents.set(documents)
        self._created.set(created_seconds)
        self._swaps.inc()

    def card(self, used_bytes: int, total_bytes: int) -> None:
        self._card_used.set(used_bytes)
        self._card_total.set(total_bytes)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Reads this process's queue length whenever metrics are exposed."""
        self._queue_length = length

    def expose(self) -> bytes:
        """Writes the text that Prometheus reads: of all processes, ended ones included, if there are several."""
        if self._queue_length is not None:
            self._queue.set(self._queue_length())
        if SHARED_FOLDER not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

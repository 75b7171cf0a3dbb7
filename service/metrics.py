"""What an operator can see of the service, as Prometheus metrics in a registry of the app's own.

Label values are bounded: routes are templates, never paths. Knows nothing of who measures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from service.timings import STAGES, Timings

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Where processes that serve together keep their numbers; prometheus_client looks at it when it is imported.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "care_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "care_request_seconds", "Seconds from request to answer.", ["route"], buckets=SECONDS, registry=registry
        )
        # Looked up by the client library at a cost that every request would pay.
        self._by_answer: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        stages = Histogram(
            "care_stage_seconds", "Seconds per stage of a search.", ["stage"], buckets=SECONDS, registry=registry
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._queries = Counter("care_queries", "Queries answered; a request may hold many.", registry=registry)
        self._batch_size = Histogram(
            "care_batch_size", "Queries per batch of the engine.", buckets=SIZES, registry=registry
        )
        self._engine_seconds = Counter(
            "care_engine_seconds",
            "Seconds that engines spent on batches; its rate is their busy share.",
            registry=registry,
        )
        self._queue = Gauge(
            "care_queue_length", "Queries that wait for the engine.", registry=registry, multiprocess_mode="livesum"
        )
        cache = Counter(
            "care_cache", "Look-ups by layer, kind and outcome.", ["layer", "kind", "outcome"], registry=registry
        )
        self._cache = {
            labels: cache.labels(*labels)
            for labels in product(("process", "redis"), ("result", "embedding"), ("hit", "miss", "bypass", "error"))
        }
        writes = Counter("care_cache_writes", "Values for Redis by outcome.", ["outcome"], registry=registry)
        self._cache_writes = {outcome: writes.labels(outcome) for outcome in ("written", "dropped", "error")}
        hyde = Counter("care_hyde", "Queries that asked for imagined documents.", ["outcome"], registry=registry)
        self._hyde = {outcome: hyde.labels(outcome) for outcome in ("used", "failed")}
        self._snapshot = Gauge(
            "care_snapshot_info",
            "1 for the snapshot that is served.",
            ["version"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._served: str | None = None
        self._documents = Gauge(
            "care_snapshot_documents",
            "Documents in the served snapshot.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._fresh = Gauge(
            "care_fresh_changes",
            "Documents posted or deleted since the served snapshot was built.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._swaps = Counter("care_swaps", "Snapshots that were put into service, by each worker.", registry=registry)
        self._restarts = Counter(
            "care_restarts", "Processes that were started again because they had ended.", ["process"], registry=registry
        )
        self._queue_length: Callable[[], int] | None = None
        self._failed_swaps = Counter("care_failed_swaps", "Snapshots that were refused.", registry=registry)

    def request(self, route: str, status: int, seconds: float | None) -> None:
        """A request ended; None: it was refused at once, which is no latency to speak of."""
        known = self._by_answer.get((route, status))
        if known is None:
            known = self._requests.labels(route, status), self._request_seconds.labels(route)
            self._by_answer[route, status] = known
        known[0].inc()
        if seconds is not None:
            known[1].observe(seconds)

    def search(self, queries: int, timings: Timings) -> None:
        """A search was answered; a stage that it did not need, because the cache knew the answer, is not observed."""
        self._queries.inc(queries)
        for stage, histogram in self._stages.items():
            if seconds := getattr(timings, stage):
                histogram.observe(seconds)

    def batch(self, size: int, seconds: float, waiting: int) -> None:
        """A batch was computed, while so many queries waited."""
        self._batch_size.observe(size)
        self._engine_seconds.inc(seconds)
        self._queue.set(waiting)

    def waiting(self, queries: int) -> None:
        self._queue.set(queries)

    def cache(self, layer: str, kind: str, outcome: str, count: int) -> None:
        self._cache[layer, kind, outcome].inc(count)

    def cache_write(self, outcome: str, count: int) -> None:
        self._cache_writes[outcome].inc(count)

    def hyde(self, outcome: str) -> None:
        self._hyde[outcome].inc()

    def swap(self, version: str, documents: int) -> None:
        # Set to nothing rather than taken away, which files that several processes share cannot do.
        if self._served is not None:
            self._snapshot.labels(self._served).set(0)
        self._served = version
        self._snapshot.labels(version).set(1)
        self._documents.set(documents)
        self._swaps.inc()

    def fresh(self, changes: int) -> None:
        self._fresh.set(changes)

    def restart(self, process: str) -> None:
        self._restarts.labels(process).inc()

    def failed_swap(self) -> None:
        self._failed_swaps.inc()

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Asks for the length of this process's queue when somebody looks."""
        self._queue_length = length

    def expose(self) -> bytes:
        """The text that Prometheus reads: of all processes, those that ended included, where there are several."""
        if self._queue_length is not None:
            self._queue.set(self._queue_length())
        if SHARED_FOLDER not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

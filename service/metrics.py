"""What an operator can see of the service, as Prometheus metrics in a registry of the app's own.

Label values are bounded: routes are templates, never paths. Knows nothing of who measures.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service.timings import STAGES, Timings

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
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
        stages = Histogram(
            "care_stage_seconds", "Seconds per stage of a search.", ["stage"], buckets=SECONDS, registry=registry
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._queries = Counter("care_queries", "Queries answered; a request may hold many.", registry=registry)
        self._batch_size = Histogram(
            "care_batch_size", "Queries per batch of the engine.", buckets=SIZES, registry=registry
        )
        self._queue = Gauge("care_queue_length", "Queries that wait for the engine.", registry=registry)
        cache = Counter("care_cache", "Look-ups by layer and outcome.", ["layer", "outcome"], registry=registry)
        self._cache = {
            (layer, outcome): cache.labels(layer, outcome)
            for layer in ("process", "redis")
            for outcome in ("hit", "miss", "error")
        }
        self._snapshot = Gauge(
            "care_snapshot_info", "1 for the snapshot that is served.", ["version"], registry=registry
        )
        self._documents = Gauge("care_snapshot_documents", "Documents in the served snapshot.", registry=registry)
        self._swaps = Counter("care_swaps", "Snapshots that were put into service.", registry=registry)
        self._failed_swaps = Counter("care_failed_swaps", "Snapshots that were refused.", registry=registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._request_seconds.labels(route).observe(seconds)

    def search(self, queries: int, timings: Timings) -> None:
        self._queries.inc(queries)
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(timings, stage))

    def batch(self, size: int) -> None:
        self._batch_size.observe(size)

    def cache(self, layer: str, outcome: str, count: int = 1) -> None:
        self._cache[layer, outcome].inc(count)

    def swap(self, version: str, documents: int) -> None:
        self._snapshot.clear()
        self._snapshot.labels(version).set(1)
        self._documents.set(documents)
        self._swaps.inc()

    def failed_swap(self) -> None:
        self._failed_swaps.inc()

    def watch_queue(self, length: Callable[[], int]) -> None:
        self._queue.set_function(length)

    def expose(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

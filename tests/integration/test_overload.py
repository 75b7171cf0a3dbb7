"""More searches than the real service can answer: each is answered or properly refused, and the service recovers.

Speed is not checked.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.harness.generator import Job, measure
from loadtest.harness.servers import FORCED, care_server, running
from models.package import BUNDLED_PAIR

QUERIES = ["高血压吃什么药", "孩子发烧怎么办", "糖尿病饮食"]
# Only one query may wait, so that this load is too much for any machine.
NARROW = {"CARE_QUEUE_LIMIT": "1", "CARE_MAX_QUERIES": "1", "CARE_BATCH_QUERIES": "1", "CARE_MAX_WAIT_MS": "60000"}


def test_overload_is_refused_properly_and_the_service_recovers(example_collection: Path, tmp_path: Path) -> None:
    settings = FORCED | NARROW | {"CARE_ENCODER": str(BUNDLED_PAIR)}
    with running(care_server(example_collection, settings), tmp_path) as started:
        flooded = measure(Job(started.url, QUERIES, "dense", connections=64, seconds=2, per_second=1500))
        assert flooded.failures == {}
        assert flooded.latency_ms
        assert flooded.refused_ms
        assert flooded.without_retry_after == 0
        assert flooded.sent == len(flooded.latency_ms) + len(flooded.refused_ms)
        after = measure(Job(started.url, QUERIES, "dense", 1, 30, first_number=10_000, max_requests=20))
        assert (len(after.latency_ms), after.failures) == (20, {})

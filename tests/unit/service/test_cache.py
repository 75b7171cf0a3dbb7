"""The process cache and the breaker alone; Redis has its own tests against a real server."""

from __future__ import annotations

import pytest

from service.cache import ENTRY_BYTES, FAILURES_TO_OPEN, OPEN_SECONDS, Breaker, Cache, ProcessCache, key_of
from service.engine.protocol import Mode, Options
from service.metrics import Metrics


def test_the_least_recently_used_value_goes_first() -> None:
    cache = ProcessCache(max_bytes=10 + 2 * ENTRY_BYTES)
    cache.put(b"a", b"1234")
    cache.put(b"b", b"1234")
    assert cache.get(b"a") == b"1234"
    cache.put(b"c", b"1234")
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == [b"1234", None, b"1234"]


def test_a_value_put_again_counts_once_and_a_giant_not_at_all() -> None:
    cache = ProcessCache(max_bytes=10 + 2 * ENTRY_BYTES)
    for _ in range(5):
        cache.put(b"a", b"12345")
    cache.put(b"b", b"12345")
    cache.put(b"giant", b"x" * (11 + ENTRY_BYTES))
    assert [cache.get(key) for key in (b"a", b"b", b"giant")] == [b"12345", b"12345", None]


def test_small_values_count_with_what_they_take_beside() -> None:
    cache = ProcessCache(max_bytes=10 * ENTRY_BYTES)
    for number in range(100):
        cache.put(b"%d" % number, b"")
    assert sum(cache.get(b"%d" % number) is not None for number in range(100)) == 10


def test_every_fact_is_part_of_the_key() -> None:
    facts = [
        ("v1", "e1", Options(Mode.DENSE, 10), ["title"], "q"),
        ("v2", "e1", Options(Mode.DENSE, 10), ["title"], "q"),
        ("v1", "e2", Options(Mode.DENSE, 10), ["title"], "q"),
        ("v1", "e1", Options(Mode.HYBRID, 10), ["title"], "q"),
        ("v1", "e1", Options(Mode.DENSE, 11), ["title"], "q"),
        ("v1", "e1", Options(Mode.DENSE, 10, weight=0.5), ["title"], "q"),
        ("v1", "e1", Options(Mode.DENSE, 10), [], "q"),
        ("v1", "e1", Options(Mode.DENSE, 10), ["title"], "Q"),
        ("v1", "e1", Options(Mode.DENSE, 10), ["title", "q"], ""),
    ]
    assert len({key_of(*fact) for fact in facts}) == len(facts)
    assert all(key_of(*fact) != b"q" and len(key_of(*fact)) == 16 for fact in facts)


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_try() -> None:
    now = 100.0
    breaker = Breaker(clock=lambda: now)
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.record(success=False)
    breaker.record(success=True)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.allows()
        breaker.record(success=False)
    assert not breaker.allows()
    now += OPEN_SECONDS
    assert breaker.allows()
    assert not breaker.allows()
    breaker.record(success=True)
    assert breaker.allows()


@pytest.mark.anyio
async def test_the_process_layer_answers_query_by_query() -> None:
    metrics = Metrics()
    cache = Cache(ProcessCache(1000), None, metrics)
    cache.put({b"a": b"1", b"c": b"3"})
    assert await cache.get([b"a", b"b", b"c"]) == [b"1", None, b"3"]
    assert b'care_cache_total{layer="process",outcome="hit"} 2.0' in metrics.expose()
    assert b'care_cache_total{layer="process",outcome="miss"} 1.0' in metrics.expose()

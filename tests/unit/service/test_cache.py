"""The process cache, the circuit breaker and both cache layers together; Redis is tested in tests/integration."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from models.encoder.tokenizer import Tokens
from service.cache.cache import ENTRY_BYTES, Cache, ProcessCache, embedding_key
from service.cache.redis import Kind
from service.limits import FAILURES_TO_OPEN, OPEN_SECONDS, Breaker
from service.metrics import Metrics

ENCODER = SimpleNamespace(fingerprint="encoder", spec=SimpleNamespace(dim=16))


def tokens(*ids: int) -> Tokens:
    return Tokens(list(ids), truncated=False)


def both_kinds(max_bytes: int = 100_000) -> dict[Kind, ProcessCache]:
    return {kind: ProcessCache(max_bytes) for kind in Kind}


def test_the_least_recently_used_value_is_evicted_first() -> None:
    cache = ProcessCache(max_bytes=10 + 2 * ENTRY_BYTES)
    cache.put(b"a", b"1234")
    cache.put(b"b", b"1234")
    assert cache.get(b"a") == b"1234"
    cache.put(b"c", b"1234")
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == [b"1234", None, b"1234"]


def test_a_value_put_twice_counts_once_and_a_too_large_one_is_not_kept() -> None:
    cache = ProcessCache(max_bytes=10 + 2 * ENTRY_BYTES)
    for _ in range(5):
        cache.put(b"a", b"12345")
    cache.put(b"b", b"12345")
    cache.put(b"giant", b"x" * (11 + ENTRY_BYTES))
    assert [cache.get(key) for key in (b"a", b"b", b"giant")] == [b"12345", b"12345", None]


def test_small_values_count_with_their_overhead() -> None:
    cache = ProcessCache(max_bytes=10 * ENTRY_BYTES)
    for number in range(100):
        cache.put(b"%d" % number, b"")
    assert sum(cache.get(b"%d" % number) is not None for number in range(100)) == 10


def test_the_breaker_opens_after_failures_in_a_row_and_admits_one_attempt(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    breaker = Breaker("the test", clock=lambda: now)
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed("once")
    breaker.succeeded()
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.allows()
        breaker.failed("TimeoutError")
    assert not breaker.allows()
    now += OPEN_SECONDS
    assert [breaker.allows() for _ in range(50)] == [True] + [False] * 49
    breaker.failed("TimeoutError")
    assert not breaker.allows()
    now += OPEN_SECONDS
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(50))
    assert [record.getMessage() for record in caplog.records] == [
        "the test failed 3 times in a row (TimeoutError); not asked for a while",
        "the test works again",
    ]


def test_an_unfinished_attempt_does_not_keep_the_breaker_open() -> None:
    now = 0.0
    breaker = Breaker("the test", clock=lambda: now)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("away")
    now = OPEN_SECONDS
    assert breaker.allows()
    now = 2 * OPEN_SECONDS
    assert breaker.allows()


def test_a_single_failure_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    breaker = Breaker("the test")
    breaker.failed("once")
    breaker.succeeded()
    assert caplog.records == []


@pytest.mark.anyio
async def test_the_process_layer_looks_up_each_key_and_kind_separately() -> None:
    metrics = Metrics()
    cache = Cache(both_kinds(), None, metrics)
    cache.put(Kind.RESULT, b"a", b"1")
    cache.put(Kind.RESULT, b"c", b"3")
    assert await cache.get(Kind.RESULT, [b"a", b"b", b"c"]) == [b"1", None, b"3"]
    assert await cache.get(Kind.EMBEDDING, [b"a"]) == [None]
    cache.bypass(Kind.RESULT, 4)
    exposed = metrics.expose().decode()
    for kind, outcome, count in (
        ("result", "hit", 2),
        ("result", "miss", 1),
        ("result", "bypass", 4),
        ("embedding", "miss", 1),
        ("embedding", "hit", 0),
    ):
        assert f'care_cache_total{{kind="{kind}",layer="process",outcome="{outcome}"}} {count}.0' in exposed
    assert 'care_cache_total{kind="result",layer="redis",outcome="bypass"} 0.0' in exposed


@pytest.mark.anyio
async def test_results_that_fill_their_memory_do_not_evict_embeddings() -> None:
    cache = Cache(both_kinds(max_bytes=10 * ENTRY_BYTES), None, Metrics())
    cache.put(Kind.EMBEDDING, b"text", b"vector")
    for number in range(100):
        cache.put(Kind.RESULT, b"%d" % number, b"")
    assert await cache.get(Kind.EMBEDDING, [b"text"]) == [b"vector"]


@pytest.mark.anyio
async def test_a_cached_embedding_is_bit_exact_and_bound_to_encoder_and_tokens() -> None:
    cache = Cache(both_kinds(), None, Metrics())
    vectors = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)
    cache.put_embedding(ENCODER, tokens(1, 2), vectors[0])
    cache.put_embedding(ENCODER, tokens(3), vectors[1])
    last, unknown, first = await cache.get_embeddings(ENCODER, [tokens(3), tokens(1), tokens(1, 2)])
    assert unknown is None
    assert np.array_equal([first, last], vectors)
    assert await cache.get_embeddings(SimpleNamespace(fingerprint="other", spec=ENCODER.spec), [tokens(3)]) == [None]


@pytest.mark.anyio
@pytest.mark.parametrize("size", [0, 3, 60, 68, 128])
async def test_an_embedding_of_another_length_is_a_miss(size: int) -> None:
    cache = Cache(both_kinds(), None, Metrics())
    cache.put(Kind.EMBEDDING, embedding_key(ENCODER.fingerprint, tokens(1)), bytes(size))
    assert await cache.get_embeddings(ENCODER, [tokens(1)]) == [None]


@pytest.mark.anyio
async def test_without_layers_nothing_is_kept() -> None:
    cache = Cache({}, None, Metrics())
    cache.put_embedding(ENCODER, tokens(1), np.zeros(4, np.float32))
    assert not cache.enabled
    assert await cache.get_embeddings(ENCODER, [tokens(1)]) == [None]

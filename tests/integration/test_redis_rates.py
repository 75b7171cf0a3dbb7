"""Rate limits in a real Redis: one bucket for all services, and a bucket per process while Redis is away."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from service.limits import FAILURES_TO_OPEN, Rate, Rates
from tests.integration.redis_support import frozen, operator, valkey

pytestmark = pytest.mark.anyio
DAY = Rate(5, 86_400)


def rates(port: int, timeout_seconds: float = 30.0) -> Rates:
    return Rates(Redis(port=port, protocol=2), timeout_seconds)


async def test_services_share_a_bucket() -> None:
    with valkey() as server:
        one, other = rates(server.port), rates(server.port)
        taken = await asyncio.gather(*(each.take("key", DAY) for each in (one, other) * 5))
        assert sum(wait == 0 for wait in taken) == 5
        assert all(0 < wait <= 86_400 / 5 for wait in taken if wait)
        assert await one.take("another key", DAY) == 0
        assert await other.take("calls", DAY, 4) == 0
        assert await one.take("calls", DAY, 2) > 0
        assert await one.take("calls", DAY, 1) == 0
        with operator(server) as redis:
            (name,) = redis.keys("*:key")
            assert 0 < redis.ttl(name) <= 86_400, "a full bucket expires"
        await one.close()
        await other.close()


async def test_a_bucket_is_refilled() -> None:
    with valkey() as server:
        own = rates(server.port)
        fast = Rate(2, 1)
        assert [await own.take("a", fast) for _ in range(2)] == [0, 0]
        async with asyncio.timeout(60):
            while await own.take("a", fast):
                await asyncio.sleep(0.05)
        await own.close()


async def test_while_redis_is_away_each_process_counts_alone() -> None:
    with valkey() as server:
        own = rates(server.port)
        assert await own.take("a", DAY) == 0
        own._timeout_seconds = 0.2
        with frozen(server):
            assert [await own.take("a", DAY) == 0 for _ in range(8)] == [True] * 5 + [False] * 3
        own._breaker._failures = 0  # as if its pause were over
        async with asyncio.timeout(60):
            while await own.take("b", Rate(1_000_000, 1)):
                await asyncio.sleep(0.05)
        server.terminate()
        assert [await own.take("c", DAY) == 0 for _ in range(FAILURES_TO_OPEN + 4)].count(True) == 5
        await own.close()

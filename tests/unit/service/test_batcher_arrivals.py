"""Property-based tests of the batcher: any arrivals in any order, with clients leaving."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.jobs import Outcome
from service.engine.local import Batcher
from service.engine.queue import Limits
from service.errors import DeadlineExceeded, EngineFailed, Overloaded
from tests.unit.service.support import FakeEngine, job, score_of, serving

QUERIES = [f"q{number}" for number in range(12)]
POISON = "q7"


@dataclass(frozen=True)
class Arrival:
    """One request: its serving, queries with their lengths, lane and timeout; whether its client
    leaves, and the pause after it."""

    serving: int
    queries: list[str]
    bulk: bool
    hurried: bool
    leaves: bool
    pause: bool


arrivals = st.builds(
    Arrival,
    serving=st.integers(0, 1),
    queries=st.lists(st.sampled_from(QUERIES), min_size=1, max_size=6),
    bulk=st.booleans(),
    hurried=st.booleans(),
    leaves=st.booleans(),
    pause=st.booleans(),
)
limits = st.builds(Limits, batch_queries=st.integers(1, 5), batch_tokens=st.integers(1, 40), queue=st.integers(6, 20))


def length_of(query: str) -> int:
    return int(query[1:]) + 1


@given(requests=st.lists(arrivals, max_size=12), limits=limits, poisoned=st.booleans(), held=st.booleans())
@settings(max_examples=80)
def test_every_accepted_query_gets_its_own_answer(
    requests: list[Arrival], limits: Limits, poisoned: bool, held: bool
) -> None:
    engine = FakeEngine()
    engine.poison = {POISON} if poisoned else set()
    if held:
        engine.hold()
    servings = [serving("first"), serving("second")]
    asyncio.run(_drive(engine, limits, requests, servings))
    for (_, batch), longest in zip(engine.batches, engine.lengths, strict=True):
        assert len(batch) <= limits.batch_queries
        assert len(batch) == 1 or len(batch) * longest <= limits.batch_tokens


async def _drive(engine: FakeEngine, limits: Limits, requests: list[Arrival], servings: list) -> None:
    batcher = Batcher(engine, limits)
    batcher.start()
    stayed: list[tuple[str, bool, asyncio.Future[Outcome]]] = []
    for request in requests:
        jobs = [job(query, length_of(query)) for query in request.queries]
        try:
            timeout_seconds = 0.0 if request.hurried else 60.0
            futures = batcher.submit(
                servings[request.serving], jobs, bulk=request.bulk, timeout_seconds=timeout_seconds
            )
        except Overloaded:
            assert request.hurried or len(batcher) + len(jobs) > limits.queue
            continue
        if request.leaves:
            for future in futures:
                future.cancel()
        else:
            stayed += [(query, request.hurried, future) for query, future in zip(request.queries, futures, strict=True)]
        if request.pause:
            await asyncio.sleep(0)
    engine.release()
    await batcher.close()
    for query, hurried, future in stayed:
        error = future.exception()
        if error is None:
            assert float(future.result().found.scores[0]) == score_of(query)
        elif isinstance(error, DeadlineExceeded):
            assert hurried
        else:
            assert isinstance(error, EngineFailed)
            assert engine.poison


@given(st.lists(st.lists(st.sampled_from(QUERIES), min_size=1, max_size=4), min_size=1, max_size=10), limits)
@settings(max_examples=50)
def test_queries_enter_the_engine_in_the_order_of_arrival(requests: list[list[str]], limits: Limits) -> None:
    engine, one = FakeEngine(), serving()

    async def drive() -> list[str]:
        batcher = Batcher(engine, Limits(limits.batch_queries, limits.batch_tokens, 1000))
        engine.hold()
        batcher.start()
        for queries in requests:
            batcher.submit(one, [job(query, length_of(query)) for query in queries])
        engine.release()
        await batcher.close()
        return [query for batch in engine.queries for query in batch]

    arrived = [query for queries in requests for query in queries]
    computed = asyncio.run(drive())
    # While the engine is blocked at most its first batch has begun, so an equal query is still in flight.
    assert computed == list(dict.fromkeys(arrived))

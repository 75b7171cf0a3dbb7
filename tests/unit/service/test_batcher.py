"""The batcher: order, one serving per batch, limits, cancellation, failure, overload."""

from __future__ import annotations

import asyncio

import pytest

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from service.engine.batches import LEAST_SLICE
from service.engine.jobs import EncodeJob
from service.engine.local import Batcher
from service.engine.queue import Limits
from service.errors import DeadlineExceeded, EngineFailed, Overloaded
from tests.unit.service.batching import busy, scores, started
from tests.unit.service.support import WAIT_SECONDS, FakeEngine, job, jobs, score_of, serving

pytestmark = pytest.mark.anyio


async def test_a_single_query_is_answered() -> None:
    async with started(FakeEngine()) as batcher:
        (future,) = batcher.submit(serving(), jobs("a"))
        outcome = await future
        assert scores([outcome]) == [score_of("a")]
        assert outcome.times.search_seconds == 0.002


async def test_waiting_queries_become_one_batch_in_order_of_arrival() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        held = await busy(engine, batcher, one)
        futures = batcher.submit(one, jobs("a", "b")) + batcher.submit(one, jobs("c"))
        assert len(batcher) == 3
        engine.release()
        assert scores(await asyncio.gather(*futures)) == [score_of(query) for query in "abc"]
        await held
    assert engine.queries == [["held"], ["a", "b", "c"]]


async def test_a_batch_ends_at_the_limit_of_queries() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(2, 1000, 100)) as batcher:
        await busy(engine, batcher, one)
        futures = batcher.submit(one, jobs(*"abcde"))
        engine.release()
        await asyncio.gather(*futures)
    assert engine.queries[1:] == [["a", "b"], ["c", "d"], ["e"]]


async def test_a_batch_ends_before_its_padding_exceeds_the_token_budget() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(8, 12, 100)) as batcher:
        await busy(engine, batcher, one)
        futures = batcher.submit(
            one, [job("a", 2), job("b", 4), job("c", 4), job("d", 5), job("huge", 50), job("e", 1)]
        )
        engine.release()
        await asyncio.gather(*futures)
    # 3 × 4 fill the budget, 2 × 5 + … do not fit with the giant, and the giant runs alone rather than never.
    assert engine.queries[1:] == [["a", "b", "c"], ["d"], ["huge"], ["e"]]


async def test_two_servings_never_share_a_batch() -> None:
    engine, old, new = FakeEngine(), serving("old"), serving("new")
    async with started(engine) as batcher:
        await busy(engine, batcher)
        futures = (
            batcher.submit(old, jobs("a", "b")) + batcher.submit(new, jobs("a", "c")) + batcher.submit(old, jobs("d"))
        )
        engine.release()
        await asyncio.gather(*futures)
    assert engine.batches[1:] == [(old, ["a", "b"]), (new, ["a", "c"]), (old, ["d"])]


async def test_equal_queries_in_flight_are_computed_once() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        held = await busy(engine, batcher, one)
        joined = batcher.submit(one, jobs("held", "a", "a")) + batcher.submit(one, jobs("a"))
        engine.release()
        outcomes = await asyncio.gather(held, *joined)
        assert scores(outcomes) == [score_of(query) for query in ("held", "held", "a", "a", "a")]
        await asyncio.gather(*batcher.submit(one, jobs("a")))
    assert engine.queries == [["held"], ["a"], ["a"]]


async def test_a_query_whose_client_left_is_not_computed() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        await busy(engine, batcher, one)
        left, stays = batcher.submit(one, jobs("left", "stays"))
        left.cancel()
        engine.release()
        await stays
    assert engine.queries == [["held"], ["stays"]]


async def test_a_shared_query_is_computed_while_one_of_its_clients_is_there() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        await busy(engine, batcher, one)
        (first,), (second,) = batcher.submit(one, jobs("a")), batcher.submit(one, jobs("a"))
        first.cancel()
        engine.release()
        assert scores([await second]) == [score_of("a")]


async def test_a_query_asked_again_after_its_client_left_is_answered() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        await busy(engine, batcher, one)
        (first,) = batcher.submit(one, jobs("a"))
        first.cancel()
        (again,) = batcher.submit(one, jobs("a"))
        engine.release()
        assert scores([await again]) == [score_of("a")]


async def test_a_client_leaving_during_a_batch_does_not_affect_others() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        held = await busy(engine, batcher, one)
        held.cancel()
        engine.release()
        assert scores(await asyncio.gather(*batcher.submit(one, jobs("next")))) == [score_of("next")]


async def test_a_failed_batch_reaches_every_waiter_and_the_batcher_survives(caplog: pytest.LogCaptureFixture) -> None:
    engine, one = FakeEngine(), serving()
    engine.poison = {"b"}
    async with started(engine) as batcher:
        await busy(engine, batcher, one)
        futures = batcher.submit(one, jobs("a", "b", "b"))
        engine.release()
        errors = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineFailed] * 3
        assert len({id(error) for error in errors}) == 3
        assert all("fell over" not in str(error) for error in errors)
        assert scores(await asyncio.gather(*batcher.submit(one, jobs("a")))) == [score_of("a")]
    assert "the device fell over" in caplog.text


async def test_a_missing_answer_of_the_engine_fails_the_batch() -> None:
    engine = FakeEngine()
    engine.short = True
    async with started(engine) as batcher:
        errors = await asyncio.gather(*batcher.submit(serving(), jobs("a", "b")), return_exceptions=True)
        assert [type(error) for error in errors] == [EngineFailed] * 2


async def test_a_full_queue_refuses_a_request_as_a_whole() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(8, 1000, queue=3)) as batcher:
        await busy(engine, batcher, one)
        accepted = batcher.submit(one, jobs("a", "b"))
        with pytest.raises(Overloaded):
            batcher.submit(one, jobs("c", "d"))
        assert len(batcher) == 2
        accepted += batcher.submit(one, jobs("e"))
        with pytest.raises(Overloaded):
            batcher.submit(one, jobs("f"))
        engine.release()
        assert scores(await asyncio.gather(*accepted)) == [score_of(query) for query in "abe"]
    assert engine.queries[1:] == [["a", "b", "e"]]


async def test_joining_a_query_in_flight_needs_no_place_in_the_queue() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(8, 1000, queue=1)) as batcher:
        await busy(engine, batcher, one)
        futures = batcher.submit(one, jobs("a")) + batcher.submit(one, jobs("a", "held"))
        engine.release()
        assert len(await asyncio.gather(*futures)) == 3


async def test_queries_of_clients_that_left_free_their_places_in_the_queue() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(8, 1000, queue=2)) as batcher:
        await busy(engine, batcher, one)
        for future in batcher.submit(one, jobs("a", "b")):
            future.cancel()
        futures = batcher.submit(one, jobs("c", "d"))
        engine.release()
        await asyncio.gather(*futures)
    assert engine.queries == [["held"], ["c", "d"]]


async def test_a_probe_gets_through_a_full_queue() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(8, 1000, queue=1)) as batcher:
        await busy(engine, batcher, one)
        batcher.submit(one, jobs("a"))
        (probe,) = batcher.submit(one, jobs("probe"), probe=True)
        engine.release()
        assert scores([await probe]) == [score_of("probe")]


async def test_a_probe_does_not_wait_behind_queued_queries() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(1, 1000, queue=10)) as batcher:
        await busy(engine, batcher, one)
        crowd = batcher.submit(one, jobs("a", "b"))
        (probe,) = batcher.submit(serving("new"), jobs("probe"), probe=True)
        engine.release()
        await asyncio.gather(probe, *crowd)
    assert engine.queries == [["held"], ["probe"], ["a"], ["b"]]


async def test_a_single_query_waits_for_one_slice_of_a_thousand_at_most() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine, Limits(32, 1000, queue=2000)) as batcher:
        await busy(engine, batcher, one)
        crowd = batcher.submit(one, jobs(*(f"bulk{number}" for number in range(1000))), bulk=True)
        (single,) = batcher.submit(one, jobs("single"))
        engine.release()
        await asyncio.gather(single, *crowd)
    assert engine.queries[1][0] == "single"
    assert len(engine.queries[1]) <= LEAST_SLICE
    assert sum(map(len, engine.queries)) == 1002


async def test_an_expired_query_is_answered_without_computing() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        held = await busy(engine, batcher, one)
        (late,) = batcher.submit(one, jobs("late"), timeout_seconds=0.0)
        (patient,) = batcher.submit(one, jobs("patient"), timeout_seconds=60.0)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(late, WAIT_SECONDS)
        engine.release()
        await asyncio.gather(held, patient)
    assert engine.queries == [["held"], ["patient"]]


async def test_a_query_in_a_hanging_engine_is_answered_at_its_deadline() -> None:
    engine = FakeEngine()
    async with started(engine) as batcher:
        engine.hold()
        (future,) = batcher.submit(serving(), jobs("a"), timeout_seconds=0.01)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(future, WAIT_SECONDS)


async def test_texts_to_encode_share_batches_with_searches() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        held = await busy(engine, batcher, one)
        text = EncodeJob("text", Side.DOCUMENT, Tokens([1, 2, 3], truncated=False))
        (encoded, twin), (searched,) = batcher.submit(one, [text, text]), batcher.submit(one, jobs("a"))
        engine.release()
        await asyncio.gather(held, searched)
        assert (await encoded).vector is (await twin).vector is not None
    assert engine.lengths == [1, 3]


async def test_every_batch_is_reported_with_the_number_of_waiting_queries() -> None:
    engine, one = FakeEngine(), serving()
    reported: list[tuple[int, bool, int]] = []
    batcher = Batcher(
        engine,
        Limits(2, 1000, 100),
        lambda size, tokens, seconds, waiting: reported.append((size, seconds > 0, waiting)),
    )
    batcher.start()
    held = await busy(engine, batcher, one)
    futures = batcher.submit(one, jobs(*"abc"))
    engine.release()
    await asyncio.gather(held, *futures)
    await batcher.close()
    assert reported == [(1, True, 3), (2, True, 1), (1, True, 0)]


class Panic(BaseException):
    """Stands for a panic of a Rust library, which is not an Exception."""


async def test_a_panic_reaches_the_waiters_and_the_thread_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "run", lambda serving, batch: (_ for _ in ()).throw(Panic()))
            (future,) = batcher.submit(one, jobs("a"))
            with pytest.raises(EngineFailed):
                await future
        (future,) = batcher.submit(one, jobs("b"))
        assert scores([await future]) == [score_of("b")]

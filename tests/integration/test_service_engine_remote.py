"""A worker and an engine over a real socket: the same rankings as in one process, and clear failures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexer.errors import BadSnapshot
from indexer.store.filters import Equal
from indexer.store.fresh_log import Frame, Posted
from indexer.store.overlay import Overlay
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from models.fusion import Mode
from service.engine.device import Cpu, searched_by
from service.engine.jobs import EncodeJob, Job, Options, Outcome, SearchJob
from service.engine.local import InProcessEngine
from service.engine.remote.client import RemoteEngine
from service.engine.remote.link import PATIENCE_SECONDS
from service.errors import DeadlineExceeded, EngineAway, EngineFailed, ShuttingDown
from service.serving.serving import Serving
from tests.api.support import Built, copy_collection, make_settings
from tests.integration.engine_half import LIMITS, WAIT_SECONDS, Engine, open_serving, worker
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

QUERIES = ["高血压吃什么药", "头痛怎么办", "asthma inhaler", "骨折", "血糖高"]


@pytest.fixture
def engine(tmp_path: Path, built: Built) -> Iterator[Engine]:
    engine = Engine(tmp_path / "engine.sock", make_settings(built))
    engine.begin()
    try:
        yield engine
    finally:
        engine.end()


def make_jobs(serving: Serving) -> list[Job]:
    """Returns one job of every kind."""
    (other,) = serving.encoder.tokenize(["发热"], Side.QUERY)
    jobs: list[Job] = [EncodeJob("发热", Side.QUERY, other)]
    for query in QUERIES:
        (tokens,) = serving.encoder.tokenize([query], Side.QUERY)
        for mode in Mode:
            own = None if mode is Mode.LEXICAL else tokens
            jobs.append(SearchJob(query, Options(mode, 3), own))
            jobs.append(SearchJob(query, Options(mode, 8, evidence=True), own, keep_vector=True))
            jobs.append(SearchJob(query, Options(mode, 2, filters=(Equal("kind", "disease"),)), own))
    vector = np.random.default_rng(0).standard_normal(serving.encoder.spec.dim, np.float32)
    vector /= np.linalg.norm(vector)
    jobs.append(SearchJob("骨折", Options(Mode.HYBRID, 5), vector=vector.tobytes()))
    return jobs


async def answers(remote: RemoteEngine, serving: Serving, jobs: list[Job], **how: object) -> list[Outcome]:
    futures = remote.submit(serving, jobs, **how)  # type: ignore[arg-type]
    return await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS)


async def test_every_job_is_answered_as_in_one_process(engine: Engine, built: Built, encoder: OnnxEncoder) -> None:
    serving = open_serving(built)
    local = replace(serving, encoder=encoder)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        for job in make_jobs(serving):  # one by one: in int8 the scale of an activation depends on the whole call
            (here,) = InProcessEngine(searched_by(Cpu(threads=1))).run(local, [job])
            (there,) = await answers(remote, serving, [job])
            assert there.found.documents.tolist() == here.found.documents.tolist()
            assert there.found.passages.tolist() == here.found.passages.tolist()
            np.testing.assert_allclose(there.found.scores, here.found.scores, rtol=1e-6)
            assert (there.vector is None) == (here.vector is None)
            if here.vector is not None:
                np.testing.assert_allclose(there.vector, here.vector, atol=1e-6)
            assert (there.found.evidence is None) == (here.found.evidence is None)
            if here.found.evidence is not None and there.found.evidence is not None:
                for ours, theirs in zip(there.found.evidence.dense, here.found.evidence.dense, strict=True):
                    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
            assert there.times.search_seconds > 0


async def test_the_event_loop_runs_while_fresh_passages_are_scored(
    engine: Engine, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = open_serving(built)
    dim = serving.encoder.spec.dim
    posted = Posted("fresh", "骨折", "骨折要固定。", {}, [(0, 6)], "fp", np.eye(1, dim, dtype=np.float16))
    fresh = replace(serving, overlay=Overlay(serving.snapshot).apply([Frame(1, 7, [posted])]))
    entered, gate, score = asyncio.Event(), threading.Event(), Overlay.score_vectors
    loop = asyncio.get_running_loop()

    def held(overlay: Overlay, queries: np.ndarray) -> np.ndarray:
        loop.call_soon_threadsafe(entered.set)
        assert gate.wait(WAIT_SECONDS)
        return score(overlay, queries)

    monkeypatch.setattr(Overlay, "score_vectors", held)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        job = SearchJob("骨折", Options(Mode.DENSE, 20), vector=np.eye(1, dim, dtype=np.float32)[0].tobytes())
        asked = asyncio.create_task(answers(remote, fresh, [job]))
        async with asyncio.timeout(WAIT_SECONDS):
            await entered.wait()
        assert not asked.done()
        gate.set()
        (outcome,) = await asked
        assert fresh.overlay.document(int(outcome.found.documents[0])).id == "fresh"


async def test_concurrent_jobs_share_batches_and_equal_jobs_are_computed_once(engine: Engine, built: Built) -> None:
    serving = open_serving(built)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        jobs = make_jobs(serving)
        outcomes = await answers(remote, serving, jobs + jobs, bulk=False)
        assert outcomes[: len(jobs)] == outcomes[len(jobs) :]
        dense = sum(job.needs_vector for job in jobs)
        assert sum(engine.batches) < 2 * dense  # a few had to search deeper
        assert len(engine.batches) < dense / 4


async def test_bulk_jobs_are_computed_in_slices_and_all_are_answered(engine: Engine, built: Built) -> None:
    serving = open_serving(built)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        texts = [f"第{number}个问题" for number in range(60)]
        jobs: list[Job] = [
            SearchJob(text, Options(Mode.DENSE, 3), tokens)
            for text, tokens in zip(texts, serving.encoder.tokenize(texts, Side.QUERY), strict=True)
        ]
        waiting = remote.submit(serving, jobs, bulk=True)
        await asyncio.sleep(0)
        assert len(remote) > 40
        (single,) = await answers(remote, serving, make_jobs(serving)[1:2])
        assert not all(future.done() for future in waiting)
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting), WAIT_SECONDS)
        assert [len(outcome.found.documents) for outcome in [single, *outcomes]] == [3] * 61


async def test_a_lost_engine_fails_jobs_in_flight_and_refuses_others_until_it_is_back(
    engine: Engine, built: Built
) -> None:
    serving = open_serving(built)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        jobs = make_jobs(serving)
        in_flight = remote.submit(serving, jobs, bulk=True)
        engine.end()
        await asyncio.wait(in_flight, timeout=WAIT_SECONDS)
        lost = [future.exception() for future in in_flight]
        assert all(error is None or isinstance(error, EngineAway) for error in lost)
        with pytest.raises(EngineAway):
            await answers(remote, serving, jobs)
        engine.begin()

        def is_back() -> bool:
            with contextlib.suppress(EngineAway):
                for future in remote.submit(serving, jobs[:1]):
                    future.cancel()
                return True
            return False

        await until(is_back)
        assert len(await answers(remote, serving, jobs)) == len(jobs)


async def test_a_snapshot_that_the_engine_refuses_is_refused_with_its_reason(tmp_path: Path, built: Built) -> None:
    own = copy_collection(built, tmp_path / "collection")
    engine = Engine(tmp_path / "engine.sock", make_settings(own))
    engine.begin()
    try:
        async with worker(engine) as remote:
            serving = open_serving(own)
            damaged = own.root / "versions" / own.versions["a"] / "vectors.npy"
            content = bytearray(damaged.read_bytes())
            content[-1] ^= 1
            damaged.write_bytes(content)
            with pytest.raises(BadSnapshot, match=r"vectors\.npy"):
                await remote.prepare(serving)
            with pytest.raises(EngineAway):
                await answers(remote, serving, make_jobs(serving)[:1])
    finally:
        engine.end()


async def test_the_engine_keeps_only_servings_that_workers_hold(engine: Engine, built: Built) -> None:
    async with worker(engine) as first, worker(engine) as second:
        old = open_serving(built, "a")
        await first.prepare(old)
        await second.prepare(old)
        new = open_serving(built, "b")
        await first.prepare(new)
        assert engine.servings.newest is not None
        assert sorted(engine.servings._held) == [1, 2]
        await answers(second, old, make_jobs(old)[:1])
        del old
        gc.collect()
        await until(lambda: sorted(engine.servings._held) == [2])
        assert len(await answers(first, new, make_jobs(new)[:1])) == 1


async def test_jobs_of_two_versions_are_answered_by_their_own_version(engine: Engine, built: Built) -> None:
    servings = {letter: open_serving(built, letter) for letter in "ab"}
    async with worker(engine) as remote:
        for serving in servings.values():
            await remote.prepare(serving)
        jobs = {letter: make_jobs(serving) for letter, serving in servings.items()}
        both = await asyncio.gather(*(answers(remote, servings[letter], jobs[letter], bulk=False) for letter in "ab"))
    for letter, outcomes in zip("ab", both, strict=True):
        for outcome in outcomes:
            for row in outcome.found.documents.tolist():
                assert servings[letter].snapshot.documents.get(row).id.startswith(f"{letter}-")


async def test_a_query_past_its_deadline_gets_an_error(engine: Engine, built: Built) -> None:
    serving = open_serving(built)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        with pytest.raises(DeadlineExceeded):
            await answers(remote, serving, make_jobs(serving)[1:2], timeout_seconds=0.0)


async def test_a_job_that_cannot_be_sent_does_not_fail_others(engine: Engine, built: Built) -> None:
    serving = open_serving(built)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        good, bad = make_jobs(serving)[1], SearchJob("骨折", Options(Mode.DENSE, 7), keep_vector=True)
        futures = remote.submit(serving, [good, bad])
        results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT_SECONDS)
        assert isinstance(results[0], Outcome)
        assert isinstance(results[1], EngineFailed)


async def test_closing_answers_what_was_accepted_and_refuses_the_rest(engine: Engine, built: Built) -> None:
    serving = open_serving(built)
    async with worker(engine) as remote:
        await remote.prepare(serving)
        await answers(remote, serving, make_jobs(serving)[:1])  # it was idle before
        futures = remote.submit(serving, make_jobs(serving))
        closing = asyncio.create_task(remote.close(WAIT_SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown):
            remote.submit(serving, make_jobs(serving))
        await closing
        assert all(future.exception() is None for future in futures)


async def test_closing_does_not_wait_for_an_engine_that_never_answers(tmp_path: Path, built: Built) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "engine.sock"))
        deaf.listen()
        remote = RemoteEngine(tmp_path / "engine.sock", LIMITS)
        remote.start()
        preparing = asyncio.create_task(remote.prepare(open_serving(built)))
        await asyncio.sleep(0.01)
        await remote.close(0.01)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
    assert PATIENCE_SECONDS > 60

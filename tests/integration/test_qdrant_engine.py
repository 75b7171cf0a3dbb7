"""The engine process with vectors in a database, seen from a worker while the database goes away and comes back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.checks import recall_queries
from indexer.errors import DatabaseAway
from indexer.store.collection import Collection, Database
from indexer.versions import Measure, publish
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from models.fusion import Mode
from service.engine.device import Cpu, searched_by
from service.engine.jobs import Options, SearchJob
from service.engine.local import InProcessEngine
from service.engine.remote.client import RemoteEngine
from service.processes.supervisor import check_engine
from service.serving.serving import Serving
from tests.api.support import Built, make_settings
from tests.integration.engine_half import WAIT_SECONDS, Engine, open_serving, worker
from tests.support.qdrant_server import QdrantServer, qdrant

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    with qdrant() as server:
        yield server


def put_into(server: QdrantServer, built: Built, encoder: OnnxEncoder) -> None:
    measure = Measure(lambda snapshot: recall_queries(encoder, snapshot.documents), 0.95)
    publish(Collection(built.root, Database.parse(server.where(), None, 30)), built.versions["a"], measure)


def jobs(serving: Serving) -> list[SearchJob]:
    queries = ["高血压吃什么药", "头痛怎么办"]
    return [SearchJob(text, Options(mode, 5), serving.encoder.tokenize([text], Side.QUERY)[0])
            for text in queries for mode in (Mode.DENSE, Mode.HYBRID)]  # fmt: skip


async def search(remote: RemoteEngine, serving: Serving) -> list[list[int]]:
    futures = remote.submit(serving, jobs(serving))
    outcomes = await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS)
    return [outcome.found.documents.tolist() for outcome in outcomes]


async def test_an_engine_without_its_database_reports_it_and_recovers(
    server: QdrantServer, built: Built, encoder: OnnxEncoder, tmp_path: Path
) -> None:
    serving = open_serving(built)
    local = dataclasses.replace(serving, encoder=encoder)
    put_into(server, built, encoder)
    server.away = True
    settings = make_settings(built, vectors=server.where(), vectors_timeout_seconds=30)
    engine = Engine(tmp_path / "engine.sock", settings)
    engine.begin()
    try:
        async with worker(engine) as remote:
            await remote.prepare(serving)
            with pytest.raises(DatabaseAway):
                await search(remote, serving)
            assert await asyncio.wait_for(check_engine(engine.path), WAIT_SECONDS)
            server.away = False
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    try:
                        found = await search(remote, serving)
                        break
                    except DatabaseAway:
                        await asyncio.sleep(0.05)
    finally:
        engine.end()
    here = InProcessEngine(searched_by(Cpu(threads=1)))
    assert found == [outcome.found.documents.tolist() for outcome in here.run(local, jobs(serving))]

"""An encoder behind an address: a build and a service use another service's /v1/embeddings as their encoder."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from cli import main
from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.snapshot import Snapshot
from models.encoder import address
from models.encoder.address import AddressEncoder
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import EncoderSpec
from models.errors import EncoderAway, EncoderMoved
from models.importing.address import Server, import_address
from service.limits import FAILURES_TO_OPEN
from service.search.embedder import EncoderServer
from tests.api.live import live
from tests.api.support import AS_ADMIN, ENCODER, ENTRIES, Built, copy_collection, make_settings, running
from tests.support.embeddings_server import EmbeddingsServer, embeddings_server
from tests.support.language_model import language_model
from tests.unit.indexer.support import write_lines

pytestmark = pytest.mark.anyio

SPACE = EncoderSpec.load(ENCODER).space
QUERIES = ["高血压吃什么药", "孩子发热怎么办", "头痛", "asthma inhaler", "骨折了先做什么", "血糖高能吃什么"]


@pytest.fixture(scope="module")
def upstream(built: Built) -> Iterator[str]:
    """Yields the address of a service that encodes for others."""
    with live(make_settings(built, threads=1, reload_seconds=0)) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def folder(upstream: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("address") / "remote-small"
    tokenizer = ENCODER / "tokenizer.json"
    fields: dict[str, Any] = {"document_fields": {"input_type": "document"}}
    import_address(Server(upstream, ENCODER.name, space=SPACE, tokenizer=tokenizer, **fields), folder)
    return folder


@pytest.fixture(scope="module")
def by_address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds the usual entries with the encoder behind the address."""
    return _build(tmp_path_factory.mktemp("built"), AddressEncoder.load(folder))


def _build(root: Path, encoder: Any, query_encoder: Any = None) -> Built:  # noqa: ANN401 - any encoder
    rows = [{"_id": entry["id"], "title": entry["title"], "text": entry["text"]} for entry in ENTRIES]
    collection = Collection(root / "collection")
    options = BuildOptions(passage_tokens=64, overlap=16, query_encoder=query_encoder)
    version = build([write_lines(root / "corpus.jsonl", *rows)], encoder, collection, options).version
    collection.publish(version)
    return Built(collection.root, {"a": version})


async def rankings(client: httpx.AsyncClient, mode: str) -> list[list[str]]:
    answer = await client.post("/v1/search", json={"query": QUERIES, "mode": mode, "top_k": 5})
    assert answer.status_code == 200, answer.text
    return [[hit["id"].rpartition("-")[2] for hit in result["hits"]] for result in answer.json()["results"]]


@pytest.fixture(scope="module")
async def expected(built: Built) -> dict[str, list[list[str]]]:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        return {mode: await rankings(client, mode) for mode in ("dense", "hybrid", "lexical")}


def alike(found: list[list[str]], expected: list[list[str]]) -> bool:
    """Compares rankings: the best hit must agree; int8 scales by batch, so near ties below it may swap."""
    overlap = np.mean([len({*a[:3]} & {*b[:3]}) / len(b[:3]) for a, b in zip(found, expected, strict=True)])
    return [a[0] for a in found] == [b[0] for b in expected] and overlap > 0.85


def test_a_build_through_the_address_has_the_vectors_of_a_local_build(
    by_address: Built, folder: Path, encoder: OnnxEncoder, tmp_path: Path
) -> None:
    remote = Snapshot.open(Collection(by_address.root).folder(by_address.versions["a"]))
    local = _build(tmp_path, encoder)
    here = Snapshot.open(Collection(local.root).folder(local.versions["a"]))
    assert remote.manifest.encoder.variant == "address"
    cosines = (remote.vectors.values.astype(float) * here.vectors.values.astype(float)).sum(axis=1)
    assert len(remote.passages) == len(here.passages)
    assert cosines.min() > 0.99
    assert AddressEncoder.load(folder).fingerprint == remote.manifest.encoder.fingerprint


async def test_a_reload_follows_the_encoder_to_another_address(by_address: Built, folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / folder.name)
    settings = make_settings(by_address, encoder=own, threads=1, reload_seconds=0, encoder_timeout_ms=60_000)
    async with running(settings) as client:
        dense = {"query": "高血压", "mode": "dense"}
        assert (await client.post("/v1/search", json=dense)).status_code == 200
        spec = json.loads((own / "encoder.json").read_text(encoding="utf-8"))
        spec["address"]["url"] = "http://127.0.0.1:9/v1"  # nothing listens there
        (own / "encoder.json").write_text(json.dumps(spec), encoding="utf-8")
        assert (await client.post("/admin/reload", headers=AS_ADMIN)).json()["changed"]
        assert (await client.post("/v1/search", json=dense)).status_code == 503


async def test_a_service_with_a_remote_encoder_ranks_like_one_with_local_weights(
    by_address: Built, folder: Path, expected: dict[str, list[list[str]]]
) -> None:
    settings = make_settings(by_address, encoder=folder, threads=1, lru_mb=8, encoder_timeout_ms=60_000)
    async with running(settings) as client:
        assert (await client.get("/readyz")).status_code == 200
        for mode, ranked in expected.items():
            assert alike(await rankings(client, mode), ranked)
        answer = (await client.post("/v1/search", json={"query": "高血压", "mode": "dense"})).json()
        assert answer["timings_ms"]["encode"] > 0
        long = (await client.post("/v1/search", json={"query": "头痛" * 600, "mode": "dense"})).json()
        assert long["results"][0]["truncated"]
        texts = await client.post("/v1/embeddings", json={"input": ["高血压", "发热"], "model": folder.name})
        assert texts.status_code == 200
        assert len(texts.json()["data"]) == 2
        posted = [{"id": "n-1", "title": "缬沙坦", "text": "缬沙坦片用于治疗高血压。"}]
        assert (await client.post("/v1/documents", json={"documents": posted}, headers=AS_ADMIN)).status_code == 200
        found = (await client.post("/v1/search", json={"query": "缬沙坦", "mode": "dense", "cache": False})).json()
        assert found["results"][0]["hits"][0]["id"] == "n-1"


async def test_hyde_without_a_document_falls_back_to_a_plain_search(by_address: Built, folder: Path) -> None:
    with language_model() as model:
        hyde: dict[str, object] = {"hyde_url": model.url, "hyde_model": "m", "encoder_timeout_ms": 60_000}
        async with running(make_settings(by_address, encoder=folder, threads=1, **hyde)) as client:
            body = {"query": "高血压吃什么药", "mode": "dense", "hyde": True}
            used = (await client.post("/v1/search", json=body)).json()["results"][0]
            model.respond = lambda number: (500, b"")
            failed = (await client.post("/v1/search", json=body)).json()["results"][0]
    assert (used["hyde"], failed["hyde"]) == ("used", "failed")
    assert used["hits"][0]["id"] == failed["hits"][0]["id"] == "1"


@pytest.mark.parametrize("documents_by_address", [True, False])
async def test_either_encoder_of_a_pair_may_be_behind_an_address(
    built: Built, folder: Path, encoder: OnnxEncoder, expected: dict[str, list[list[str]]], tmp_path: Path,
    documents_by_address: bool,
) -> None:  # fmt: skip
    remote = AddressEncoder.load(folder)
    sides = (remote, encoder) if documents_by_address else (encoder, remote)
    pair = _build(tmp_path, *sides)
    asking = ENCODER if documents_by_address else folder
    async with running(make_settings(pair, encoder=asking, threads=1, encoder_timeout_ms=60_000)) as client:
        assert alike(await rankings(client, "dense"), expected["dense"])


def test_commands_accept_a_folder_with_an_address(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["encoder", "pair", str(folder), str(ENCODER)]) == 0
    assert "they share a space" in capsys.readouterr().out
    rows = [{"_id": entry["id"], "title": entry["title"], "text": entry["text"]} for entry in ENTRIES]
    corpus = str(write_lines(tmp_path / "corpus.jsonl", *rows))
    place = ["--collection", str(tmp_path / "collection")]
    given = ["--encoder", str(folder), "--query-encoder", str(folder)]
    assert main(["index", "build", corpus, "--publish", *given, *place]) == 0
    assert main(["index", "build", corpus, "--publish", *given, *place]) == 0
    assert "unchanged" in capsys.readouterr().out
    assert main(["index", "diff", "--query-encoder", str(folder), *place]) == 0
    assert main(["index", "build", corpus, *given, *place, "--precision", "fp32"]) == 1
    assert "is run by a server" in capsys.readouterr().err


# A server whose answers the test scripts.


@pytest.fixture
def scripted(built: Built, tmp_path: Path) -> Iterator[tuple[EmbeddingsServer, Built, Path]]:
    """Yields a scripted server, a collection that it encoded, and its encoder folder."""
    with embeddings_server() as server:
        import_address(Server(server.url, "toy"), tmp_path / "toy")
        yield server, _build(tmp_path, AddressEncoder.load(tmp_path / "toy")), tmp_path / "toy"


async def search(client: httpx.AsyncClient, mode: str = "dense", **fields: object) -> httpx.Response:
    return await client.post("/v1/search", json={"query": "高血压", "mode": mode, **fields})


@pytest.mark.parametrize("trouble", ["500", "429", "html", "gone", "slow"])
async def test_an_unreachable_server_gives_503_with_a_reason_and_lexical_search_works(
    scripted: tuple[EmbeddingsServer, Built, Path], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, built, folder = scripted
    embed = EncoderServer.embed

    async def embed_within_200_ms(server: EncoderServer, *arguments: Any) -> NDArray[np.float32]:  # noqa: ANN401
        server._timeout_seconds = 0.2
        return await embed(server, *arguments)

    settings = make_settings(built, encoder=folder, encoder_timeout_ms=60_000, threads=1, lru_mb=8)
    async with running(settings) as client:
        assert (await search(client)).status_code == 200
        match trouble:
            case "500":
                server.override = lambda body: (500, {}, {})
            case "429":
                server.override = lambda body: (429, {}, {"Retry-After": "17"})
            case "html":
                server.override = lambda body: (200, b"<html>", {})
            case "gone":
                server.override = lambda body: (404, {"error": body["input"]}, {})
            case "slow":
                server.is_awake.clear()
                monkeypatch.setattr(EncoderServer, "embed", embed_within_200_ms)
        for _ in range(FAILURES_TO_OPEN):
            failed = await search(client, cache=False)
            assert failed.status_code == 503
        asked = len(server.bodies)
        ready = await client.get("/readyz")
        hybrid = await search(client, "hybrid", cache=False)
        words = await search(client, "lexical", cache=False)
        assert len(server.bodies) == asked  # the breaker is open
        said = failed.json()["error"]
        assert said["code"] == ready.json()["error"]["code"] == hybrid.json()["error"]["code"] == "encoder_away"
        reason = {
            "500": "status 500",
            "429": "status 429",
            "html": "not usable",
            "gone": "status 404",
            "slow": "200 ms",
        }
        assert reason[trouble] in said["message"]
        assert "mode lexical works without it" in said["message"]
        assert "高血压" not in said["message"]
        document = {"id": "n-1", "text": "缬沙坦片用于治疗高血压。"}
        posted = await client.post("/v1/documents", json={"documents": [document]}, headers=AS_ADMIN)
        assert (posted.status_code, posted.json()["error"]["code"]) == (503, "encoder_away")
        assert posted.json()["error"]["message"].endswith("; try again later"), "no mode works for a post"
        assert failed.headers["Retry-After"] == ("17" if trouble == "429" else "5" if trouble == "slow" else "1")
        assert (ready.status_code, words.status_code) == (503, 200)
        assert words.json()["results"][0]["hits"]
        assert (await client.get("/livez")).status_code == 200


async def test_a_slow_server_blocks_neither_lexical_search_nor_the_event_loop(
    scripted: tuple[EmbeddingsServer, Built, Path],
) -> None:
    server, built, folder = scripted
    async with running(make_settings(built, encoder=folder, threads=1, encoder_timeout_ms=60_000)) as client:
        await search(client)
        server.is_awake.clear()
        waiting = [asyncio.create_task(search(client)) for _ in range(4)]
        while server.under_way < 4:
            await asyncio.sleep(0.01)
        assert (await search(client, "lexical")).status_code == 200
        late = await search(client, timeout_ms=50)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert not any(task.done() for task in waiting)
        server.is_awake.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4


async def test_a_text_that_the_server_refuses_does_not_open_the_breaker(
    scripted: tuple[EmbeddingsServer, Built, Path],
) -> None:
    server, built, folder = scripted
    async with running(make_settings(built, encoder=folder, threads=1, encoder_timeout_ms=60_000)) as client:
        server.override = lambda body: (400, {"error": "too long"}, {}) if "错" in body["input"][0] else None
        for _ in range(FAILURES_TO_OPEN + 1):
            refused = await client.post("/v1/search", json={"query": "错", "mode": "dense"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert (await search(client)).status_code == 200


async def test_a_service_starts_without_the_server_and_is_ready_when_it_is_back(
    scripted: tuple[EmbeddingsServer, Built, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, built, folder = scripted
    server.override = lambda body: (503, {}, {})
    async with running(make_settings(built, encoder=folder, threads=1, encoder_timeout_ms=60_000)) as client:
        assert (await client.get("/readyz")).json()["error"]["code"] == "encoder_away"
        assert (await search(client, "lexical")).json()["results"][0]["hits"]
        server.override = lambda body: None
        assert (await client.get("/readyz")).status_code == 200


async def test_a_server_with_another_model_is_refused_at_startup_and_while_serving(
    scripted: tuple[EmbeddingsServer, Built, Path],
) -> None:
    server, built, folder = scripted
    settings = make_settings(built, encoder=folder, threads=1, encoder_timeout_ms=60_000)
    async with running(settings) as client:
        server.once((500, {}, {}))  # a restart, for example; afterwards the canaries are checked again
        assert (await search(client)).status_code == 503
        server.salt = "another model"
        moved = await search(client)
        assert (moved.status_code, moved.json()["error"]["code"]) == (503, "encoder_moved")
        assert "have it run the same model again" in moved.json()["error"]["message"]
        assert (await client.get("/readyz")).json()["error"]["code"] == "encoder_moved"
        assert (await search(client, "lexical")).status_code == 200
    with pytest.raises(EncoderMoved, match="have it run the same model again"):
        async with running(settings):
            pass


async def test_repeated_queries_are_answered_from_the_cache(
    scripted: tuple[EmbeddingsServer, Built, Path],
) -> None:
    server, built, folder = scripted
    async with running(make_settings(built, encoder=folder, threads=1, lru_mb=8, encoder_timeout_ms=60_000)) as client:
        first = await search(client)
        server.bodies.clear()
        again = await search(client, top_k=3)
        other = await client.post("/v1/search", json={"query": "高 血压", "mode": "dense"})
        assert server.texts == ["高 血压"]
        assert first.json()["results"][0]["hits"][:3] == again.json()["results"][0]["hits"]
        assert other.status_code == 200
        await search(client, cache=False)
        assert server.texts == ["高 血压", "高血压"]


def test_a_build_resumes_after_its_server_died(
    scripted: tuple[EmbeddingsServer, Built, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, folder = scripted
    monkeypatch.setattr(address, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(address, "FIRST_PAUSE_SECONDS", 0.01)
    rows = [{"_id": str(number), "text": f"第{number}种药的用法"} for number in range(40)]
    corpus = write_lines(tmp_path / "many.jsonl", *rows)
    encoder, options = AddressEncoder.load(folder), BuildOptions(shard_texts=8)
    server.bodies.clear()
    dead = threading.Event()

    def die(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]] | None:
        if len(server.bodies) > 3:
            dead.set()
        return (503, {}, {}) if dead.is_set() else None

    server.override = die
    collection = Collection(tmp_path / "resumed")
    with pytest.raises(EncoderAway, match="run the same command again"):
        build([corpus], encoder, collection, options)
    done = [text for body in server.bodies[:3] for text in body["input"]]
    assert len(done) == 24
    server.override, server.bodies = lambda body: None, []
    summary = build([corpus], encoder, collection, options)
    assert (summary.encoded, summary.reused) == (16, 24)
    assert sorted(done + server.texts) == sorted(row["text"] for row in rows)


def test_a_build_retries_when_the_server_refuses_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(address, "FIRST_PAUSE_SECONDS", 0.01)
    with embeddings_server() as server:
        import_address(Server(server.url, "toy"), tmp_path / "toy")
        encoder = AddressEncoder.load(tmp_path / "toy")
    corpus = write_lines(tmp_path / "c.jsonl", {"_id": "1", "text": "药"})
    with pytest.raises(EncoderAway, match="ConnectError"):
        build([corpus], encoder, Collection(tmp_path / "collection"))


async def test_the_engine_process_uses_a_remote_encoder(by_address: Built, folder: Path, tmp_path: Path) -> None:
    from tests.integration.processes import service

    own = copy_collection(by_address, tmp_path / "own")
    environment = {"CARE_ENCODER": str(folder), "CARE_ENGINE": "process", "CARE_ENCODER_TIMEOUT_MS": "60000"}
    with service(own, **environment) as running_service:
        assert running_service.is_ready()
        answer = running_service.search({"query": "高血压吃什么药", "mode": "dense"})
        assert answer.status == 200, answer.text
        assert json.loads(answer.text)["results"][0]["hits"][0]["id"] == "1"
    shutil.rmtree(own.root)

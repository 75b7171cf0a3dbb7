"""Documents posted to a service whose snapshot was made by another encoder: they rank like their indexed copies."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from indexer.store.collection import Collection
from indexer.store.fresh_log import Posted
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import EncoderSpec
from tests.api.pair import SHIFTED, build_shifted
from tests.api.support import ENCODER, ENTRIES, Built, copy_collection, make_settings, running

pytestmark = pytest.mark.anyio

QUERY = "高血压吃什么药"


async def scores(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.post("/v1/search", json={"query": QUERY, "mode": "dense", "top_k": 100})
    return {hit["id"]: hit["score"] for hit in response.json()["results"][0]["hits"]}


async def post_copies(client: httpx.AsyncClient) -> None:
    """Posts each document again under another id, beside its indexed copy."""
    copies: list[dict[str, Any]] = [
        {"id": f"copy-{entry['id']}", "title": entry["title"], "text": entry["text"]} for entry in ENTRIES
    ]
    assert (await client.post("/v1/documents", json={"documents": copies})).status_code == 200


async def test_a_fresh_document_scores_like_its_indexed_copy_and_after_a_restart(
    tmp_path: Path, encoder: OnnxEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(build_shifted(tmp_path, encoder, encoder), threads=1, reload_seconds=0)
    async with running(settings) as client:
        before = await scores(client)
        await post_copies(client)
        after = await scores(client)
        assert {name: after[name] for name in before} == before
        for name, score in before.items():
            assert after[f"copy-{name}"] == pytest.approx(score, abs=0.03)
        # A text that the snapshot has under this id keeps the snapshot's vector.
        stored = {name: ENTRIES[0][name] for name in ("id", "title", "text")}
        again = await client.post("/v1/documents", json={"documents": [stored | {"metadata": {"kind": "new"}}]})
        assert again.status_code == 200
        assert (await scores(client))["1"] == pytest.approx(before["1"], abs=1e-3)
    async with running(settings) as client:
        assert await scores(client) == pytest.approx(after, abs=1e-3)
    assert "--query-encoder" not in caplog.text


async def test_vectors_of_another_encoder_are_computed_again_and_corrected(
    tmp_path: Path, encoder: OnnxEncoder
) -> None:
    own = build_shifted(tmp_path, encoder, encoder)
    title, text = ENTRIES[0]["title"], ENTRIES[0]["text"]
    foreign = Posted("copy-1", title, text, {}, [(0, 3)], "another", np.ones((1, 4), np.float16))
    Collection(own.root).fresh_log.append([foreign])
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        found = await scores(client)
        assert found["copy-1"] == pytest.approx(found["1"], abs=0.03)


async def test_a_query_encoder_with_fewer_tokens_does_not_cut_more_passages(
    tmp_path: Path, encoder: OnnxEncoder
) -> None:
    """Each piece would be corrected like a whole passage, and the best of many pieces would outrank a single one."""
    folder = tmp_path / "short"
    shutil.copytree(ENCODER, folder)
    EncoderSpec.load(folder).model_copy(update={"max_length": 24}).save(folder)
    own = build_shifted(tmp_path, encoder, OnnxEncoder.load(folder, threads=1))
    settings = make_settings(own, threads=1, reload_seconds=0).model_copy(update={"encoder": folder})
    async with running(settings) as client:
        before = (await client.get("/v1/collection")).json()
        await post_copies(client)
        after = (await client.get("/v1/collection")).json()
    assert before["passages"] > before["documents"] == len(ENTRIES)
    assert after["passages"] == 2 * before["passages"]


async def test_without_a_correction_the_log_warns_once_with_the_remedy(
    tmp_path: Path, encoder: OnnxEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(build_shifted(tmp_path, encoder, None), threads=1, reload_seconds=0)
    async with running(settings) as client:
        with caplog.at_level(logging.WARNING, logger="service.updates.encoder"):
            await post_copies(client)
            another = {"id": "another", "text": "氨氯地平缓释片说明书。"}
            assert (await client.post("/v1/documents", json={"documents": [another]})).status_code == 200
        after = await scores(client)
        assert after["copy-1"] > after["1"] + 0.1
    warnings = [record.getMessage() for record in caplog.records if "--query-encoder" in record.getMessage()]
    assert len(warnings) == 1
    async with running(settings):  # reads them from the log
        assert caplog.text.count("--query-encoder") == 2
    assert encoder.fingerprint in warnings[0]
    assert SHIFTED in warnings[0]


async def test_one_encoder_for_both_sides_gives_no_warning(
    tmp_path: Path, built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    own = copy_collection(built, tmp_path / "collection")
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        await post_copies(client)
        after = await scores(client)
        assert after["copy-1"] == pytest.approx(after["a-1"], abs=0.01)
    assert "--query-encoder" not in caplog.text

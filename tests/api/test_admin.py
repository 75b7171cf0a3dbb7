"""Reload, rollback and the list of versions; a refused version leaves the old one serving."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import EncoderSpec, Pooling
from models.errors import SpaceMismatch
from service.engine.local import Batcher
from service.errors import EngineAway
from service.http.app import create_app
from service.serving.serving import Serving
from service.updates.swap import TRIES
from tests.api.support import (
    AS_ADMIN,
    ENCODER,
    Built,
    build_collection,
    client_of,
    copy_collection,
    make_settings,
    running,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def own(built: Built, tmp_path: Path) -> Built:
    return copy_collection(built, tmp_path / "collection")


async def served(client: httpx.AsyncClient) -> str:
    return (await client.get("/v1/search?q=高血压")).json()["snapshot"]


async def test_reload_serves_the_published_version(own: Built) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        assert await served(client) == own.versions["a"]
        unchanged = await client.post("/admin/reload")
        assert unchanged.json() == {"snapshot": own.versions["a"], "changed": False}
        Collection(own.root).publish(own.versions["b"])
        assert await served(client) == own.versions["a"]
        changed = await client.post("/admin/reload")
        assert changed.json() == {"snapshot": own.versions["b"], "changed": True}
        assert await served(client) == own.versions["b"]
        assert (await client.get("/v1/documents/a-1")).status_code == 404
        assert f'version="{own.versions["b"]}"' in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/admin/rollback?versoin=x", b"", "versoin", "did you mean version?"),
        ("/admin/rollback", b'{"version": "x"}', "body", "name a version in the URL: /admin/rollback?version=…"),
        ("/admin/reload?version=x", b"", "version", "no such parameter"),
        ("/admin/rollback?version=", b"", "version", "is empty; give it a value, or leave it out"),
        ("/admin/rollback?version=a&version=b", b"", "version", "is given twice"),
    ],
)
async def test_a_body_that_would_be_ignored_is_refused(
    own: Built, path: str, body: bytes, field: str, message: str
) -> None:
    """Otherwise another version than the intended one would be served."""
    Collection(own.root).publish(own.versions["b"])
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        refused = await client.post(path, content=body)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)
        assert message in refused.json()["error"]["message"]
        assert await served(client) == own.versions["b"]
        assert (await client.post("/admin/rollback", json={})).json()["snapshot"] == own.versions["a"]


async def test_the_poller_follows_the_pointer(own: Built) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0.01)) as client:
        Collection(own.root).publish(own.versions["b"])
        async with asyncio.timeout(60):
            while await served(client) != own.versions["b"]:
                await asyncio.sleep(0.01)


async def test_the_poller_finds_the_first_snapshot(own: Built) -> None:
    (own.root / "CURRENT").unlink()
    async with running(make_settings(own, threads=1, reload_seconds=0.01)) as client:
        assert (await client.get("/readyz")).status_code == 503
        Collection(own.root).publish(own.versions["a"])
        async with asyncio.timeout(60):
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_rollback_moves_the_pointer_and_serves_the_older_version(own: Built) -> None:
    Collection(own.root).publish(own.versions["b"])
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        response = await client.post("/admin/rollback", params={"version": own.versions["a"]})
        assert response.json() == {"snapshot": own.versions["a"], "changed": True}
        assert Collection(own.root).current() == own.versions["a"]
        assert await served(client) == own.versions["a"]


async def test_a_rollback_that_the_disk_refuses_says_so(own: Built) -> None:
    Collection(own.root).publish(own.versions["b"])
    (own.root / "LOCK.publish").unlink()
    (own.root / "LOCK.publish").mkdir()  # root may write into a folder without permissions
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        for version in own.versions.values():  # another one, and the one that is served
            response = await client.post("/admin/rollback", params={"version": version})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_kept")
        assert await served(client) == Collection(own.root).current() == own.versions["b"]


async def test_a_rollback_runs_the_canaries_unless_forced(own: Built) -> None:
    Collection(own.root).publish(own.versions["b"])
    canary = {"query": "高血压吃什么药", "must": ["b-1"]}
    (own.root / "canaries.jsonl").write_text(json.dumps(canary), encoding="utf-8")
    older = {"version": own.versions["a"]}
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        refused = await client.post("/admin/rollback", params=older)
        assert refused.status_code == 409
        assert "lacks b-1 among its first 10" in refused.json()["error"]["message"]
        assert Collection(own.root).current() == await served(client) == own.versions["b"]
        assert own.versions["a"] not in (own.root / "PUBLISHED").read_text().splitlines()[1:], "it was never served"
        unclear = await client.post("/admin/rollback", params=older | {"force": "perhaps"})
        assert (unclear.status_code, unclear.json()["error"]["field"]) == (422, "force")
        forced = await client.post("/admin/rollback", params=older | {"force": "true"})
        assert forced.json() == {"snapshot": own.versions["a"], "changed": True}
        back = await client.post("/admin/rollback", params={"version": own.versions["b"]})
        assert back.json() == {"snapshot": own.versions["b"], "changed": True}


@pytest.mark.parametrize("version", ["nothing", "../../etc"])
async def test_a_version_that_does_not_exist_is_refused(own: Built, version: str) -> None:
    (own.root / "PUBLISHED").write_text(f"{own.versions['a']}\n")
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        response = await client.post("/admin/rollback", params={"version": version})
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "bad_collection"
        assert f"has no version {version}; it has {own.versions['a']}" in response.json()["error"]["message"]
        assert await served(client) == own.versions["a"]
        assert "care_failed_swaps_total 0.0" in (await client.get("/metrics")).text, "it is the request that is wrong"


async def test_versions_lists_all_versions_and_marks_the_served_one(own: Built) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        Collection(own.root).publish(own.versions["b"])
        answer = (await client.get("/admin/versions")).json()
        assert answer == {
            "versions": sorted(own.versions.values()),
            "current": own.versions["b"],
            "serving": own.versions["a"],
            "failed": None,
        }


async def test_a_damaged_snapshot_is_refused_and_the_old_one_is_still_served(own: Built) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0.01)) as client:
        folder = own.root / "versions" / own.versions["b"]
        damaged = folder / "documents.bin"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (own.root / "CURRENT").write_text(own.versions["b"])
        async with asyncio.timeout(60):
            while (await client.get("/admin/versions")).json()["failed"] is None:
                await asyncio.sleep(0.01)
        assert await served(client) == own.versions["a"]
        assert (await client.get("/readyz")).status_code == 200
        response = await client.post("/admin/reload")
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "bad_snapshot"
        assert "documents.bin" in response.json()["error"]["message"]
        # Once by the poller, which does not retry, and once by hand.
        await asyncio.sleep(0.1)
        assert "care_failed_swaps_total 2.0" in (await client.get("/metrics")).text


async def test_a_pointer_that_cannot_be_read_is_reported_once(own: Built, caplog: pytest.LogCaptureFixture) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0.01)) as client:
        pointer = own.root / "CURRENT"
        pointer.unlink()
        pointer.mkdir()
        async with asyncio.timeout(60):
            while "care_failed_swaps_total 1.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
        assert (await client.post("/admin/reload")).status_code == 409
        await asyncio.sleep(0.1)
        assert "care_failed_swaps_total 1.0" in (await client.get("/metrics")).text
        assert [line for line in caplog.messages if "CURRENT is not readable" in line] == [
            line for line in caplog.messages if line.startswith(f"{own.versions['a']} stays in service: ")
        ]
        assert await served(client) == own.versions["a"]
        pointer.rmdir()
        pointer.write_text(own.versions["b"])
        async with asyncio.timeout(60):
            while await served(client) != own.versions["b"]:
                await asyncio.sleep(0.01)


async def test_a_service_whose_first_snapshot_is_refused_reports_the_reason(own: Built) -> None:
    (own.root / "CURRENT").unlink()
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        damaged = own.root / "versions" / own.versions["b"] / "documents.bin"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (own.root / "CURRENT").write_text(own.versions["b"])
        assert (await client.post("/admin/reload")).status_code == 409
        response = await client.get("/v1/search", params={"q": "高血压"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert response.json()["error"]["message"].startswith("no snapshot is served: ")
        assert "documents.bin" in response.json()["error"]["message"]


@pytest.mark.parametrize("failures", [TRIES - 1, 1000])
async def test_a_version_is_tried_again_if_the_engine_failed_rather_than_the_version(
    own: Built, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    tried: list[str] = []
    looks = 0
    look = Collection.current

    async def prepare(home: Batcher, serving: Serving) -> None:
        if serving.version == own.versions["b"]:
            tried.append(serving.version)
            if len(tried) <= failures:
                raise EngineAway("the engine process ended; it is started again")

    def count_looks(collection: Collection) -> str | None:
        nonlocal looks
        looks += 1
        return look(collection)

    monkeypatch.setattr(Batcher, "prepare", prepare)
    monkeypatch.setattr(Collection, "current", count_looks)
    async with running(make_settings(own, threads=1, reload_seconds=0.01)) as client, asyncio.timeout(60):
        Collection(own.root).publish(own.versions["b"])
        while len(tried) < TRIES:
            await asyncio.sleep(0.01)
        if failures < TRIES:
            while await served(client) != own.versions["b"]:
                await asyncio.sleep(0.01)
            return
        seen = looks
        while looks < seen + 10:  # it is seen and not tried again
            await asyncio.sleep(0.01)
        assert len(tried) == TRIES
        assert await served(client) == own.versions["a"]
        assert (await client.get("/admin/versions")).json()["failed"] == "the engine process ended; it is started again"
        assert (await client.post("/admin/reload")).status_code == 503
        assert len(tried) == TRIES + 1


async def test_a_version_is_tried_again_until_file_descriptors_are_free(
    own: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, failures = np.load, TRIES + 2

    def fail(path: Path, **options: object) -> NDArray[Any]:
        nonlocal failures
        if own.versions["b"] in str(path) and failures:
            failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return load(path, **options)

    async with running(make_settings(own, threads=1, reload_seconds=0.01)) as client, asyncio.timeout(60):
        monkeypatch.setattr(np, "load", fail)
        (own.root / "CURRENT").write_text(own.versions["b"])
        while await served(client) != own.versions["b"]:
            await asyncio.sleep(0.01)
    assert failures == 0


async def test_a_snapshot_of_another_space_is_refused_and_a_rollback_to_it_undone(
    own: Built, encoder: OnnxEncoder, tmp_path: Path
) -> None:
    elsewhere = encoder.spec.model_copy(update={"space": "another"})
    stranger = OnnxEncoder(elsewhere, encoder.variant, encoder.tokenizer, encoder._session)
    foreign = build_collection(tmp_path / "foreign", stranger, "x").versions["x"]
    shutil.copytree(tmp_path / "foreign" / "versions" / foreign, own.root / "versions" / foreign)
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        response = await client.post("/admin/rollback", params={"version": foreign})
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "space_mismatch"
        assert "another" in response.json()["error"]["message"]
        assert Collection(own.root).current() == own.versions["a"]
        assert await served(client) == own.versions["a"]
    (own.root / "CURRENT").write_text(foreign)
    with pytest.raises(SpaceMismatch):
        async with running(make_settings(own, threads=1)):
            pass


async def test_an_encoder_with_other_weights_is_refused_at_startup_until_admitted(own: Built, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(ENCODER, folder)
    spec = EncoderSpec.load(folder).model_copy(update={"pooling": Pooling.MEAN})  # same space, dimension and graph
    spec.save(folder)
    settings = make_settings(own, threads=1, reload_seconds=0).model_copy(update={"encoder": folder})
    with pytest.raises(SpaceMismatch, match="care index admit ENCODER_FOLDER"):
        async with running(settings):
            pass
    Collection(own.root).admit(own.versions["a"], spec)
    async with running(settings) as client:
        assert await served(client) == own.versions["a"]


async def test_the_next_reload_loads_a_new_encoder_from_the_folder(own: Built, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(ENCODER, folder)
    settings = make_settings(own, threads=1, reload_seconds=0).model_copy(update={"encoder": folder})
    async with running(settings) as client:
        before = (await client.get("/v1/collection")).json()["encoder"]
        spec = EncoderSpec.load(folder)
        spec.model_copy(update={"max_length": 32}).save(folder)
        assert (await client.get("/v1/collection")).json()["encoder"] == before
        assert (await client.post("/admin/reload")).json()["changed"] is True
        after = (await client.get("/v1/collection")).json()["encoder"]
        assert after["max_length"] == 32
        assert after["fingerprint"] != before["fingerprint"]


async def test_the_replaced_snapshot_is_released(own: Built) -> None:
    app = create_app(make_settings(own, threads=1, reload_seconds=0))
    async with app.router.lifespan_context(app), client_of(app) as client:
        old = weakref.ref(app.state.runtime.servings.current())
        await served(client)
        Collection(own.root).publish(own.versions["b"])
        await client.post("/admin/reload")
        await served(client)
        gc.collect()
        assert old() is None


async def test_without_a_token_admin_routes_are_closed_to_localhost_too(built: Built) -> None:
    app = create_app(make_settings(built, threads=1, reload_seconds=0, admin_token=None))
    async with app.router.lifespan_context(app):
        for headers in ({}, AS_ADMIN, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            async with client_of(app, headers) as client:
                for request in (client.get("/admin/versions"), client.post("/admin/reload")):
                    response = await request
                    assert response.status_code == 403
                    assert "set CARE_ADMIN_TOKEN" in response.json()["error"]["message"]


async def test_with_a_token_admin_routes_accept_only_the_token(built: Built) -> None:
    app = create_app(make_settings(built, threads=1, reload_seconds=0, admin_token="s3cret"))
    async with app.router.lifespan_context(app), client_of(app, {}) as client:
        missing = await client.get("/admin/versions")
        assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
        for wrong in ("Bearer wrong", "s3cret", "Bearer ", "Bearer s3cret\u00e9"):
            response = await client.get("/admin/versions", headers={"Authorization": wrong.encode("latin-1")})  # type: ignore[dict-item]
            assert response.status_code == 401
        right = await client.get("/admin/versions", headers={"Authorization": "Bearer s3cret"})
        assert right.status_code == 200
        assert "s3cret" not in json.dumps(right.json())

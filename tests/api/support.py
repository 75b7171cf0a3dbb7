"""Real collections and running apps for the tests of the service."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from service.http.app import create_app
from service.settings import Settings

ENCODER = Path("models/pretrained/care-small-zh")
PATIENCE_MS = 120_000
TOKEN = "token-of-the-tests"
AS_ADMIN = {"Authorization": f"Bearer {TOKEN}"}
# Environment of a service under test: a busy machine must not look like an overloaded service.
PATIENT = {name: str(PATIENCE_MS) for name in ("CARE_MAX_WAIT_MS", "CARE_TIMEOUT_MS", "CARE_PROBE_TIMEOUT_MS")}
# For tests that post documents or call /admin.
OPEN = {"CARE_ADMIN_TOKEN": TOKEN}
LONG = "头痛可由感冒、疲劳或睡眠不足引起，休息和补水常能缓解。" * 12
ENTRIES: list[dict[str, Any]] = [
    {
        "id": "1",
        "title": "高血压用药",
        "text": "氨氯地平是治疗高血压的常用药，每日一次。",
        "kind": "drug",
        "year": 2024,
    },
    {
        "id": "2",
        "title": "糖尿病饮食",
        "text": "糖尿病人应当控制主食，少吃甜食，监测血糖。",
        "kind": "disease",
        "year": 2025,
    },
    {
        "id": "3",
        "title": "发热处理",
        "text": "发热超过38.5度可以服用布洛芬或对乙酰氨基酚。",
        "kind": "drug",
        "year": 2023,
    },
    {
        "id": "4",
        "title": "心肺复苏",
        "text": "胸外按压每分钟100到120次，深度5到6厘米。",
        "kind": "first-aid",
        "year": 2025,
    },
    {
        "id": "5",
        "title": "骨折固定",
        "text": "怀疑骨折时不要移动患肢，用夹板固定后就医。",
        "kind": "first-aid",
        "year": 2022,
    },
    {"id": "6", "title": "头痛", "text": LONG, "kind": "disease", "year": 2021},
    {
        "id": "7",
        "title": "Asthma",
        "text": "Asthma causes wheezing; an inhaler relieves the attack.",
        "kind": "disease",
        "year": 2020,
    },
    {"id": "8", "title": "血常规", "text": "血常规检查白细胞、红细胞和血小板的数量。", "kind": "test", "year": 2024},
]


@dataclass(frozen=True)
class Built:
    """A collection with two versions of the same entries; every id starts with its version's letter."""

    root: Path
    versions: Mapping[str, str]

    @property
    def letters(self) -> dict[str, str]:
        return {version: letter for letter, version in self.versions.items()}


_first_builds: dict[tuple[str, str], Built] = {}


def build_collection(root: Path, encoder: OnnxEncoder, letters: str = "ab") -> Built:
    """Returns one version per letter, the first one published; built once per session and encoder, then copied."""
    key = (encoder.fingerprint, letters)
    if key not in _first_builds:
        place = Path(tempfile.mkdtemp(prefix="care-tests-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        _first_builds[key] = _build_collection(place / "collection", encoder, letters)
    return copy_collection(_first_builds[key], root)


def _build_collection(root: Path, encoder: OnnxEncoder, letters: str) -> Built:
    collection = Collection(root)
    versions = {}
    for letter in letters:
        corpus = root.parent / f"{root.name}-{letter}.jsonl"
        corpus.write_text("".join(f"{_line(letter, entry)}\n" for entry in ENTRIES), encoding="utf-8")
        versions[letter] = build([corpus], encoder, collection, BuildOptions(passage_tokens=64, overlap=16)).version
    collection.publish(versions[letters[0]])
    return Built(root, versions)


def copy_collection(built: Built, root: Path) -> Built:
    """Copies a collection, so that a test can publish in it and damage it."""
    shutil.copytree(built.root, root)
    return Built(root, built.versions)


def make_settings(built: Built, **values: object) -> Settings:
    """Builds settings with long timeouts for a busy machine, unless the test sets its own."""
    patient = {"timeout_ms": PATIENCE_MS, "max_wait_ms": PATIENCE_MS, "probe_timeout_ms": PATIENCE_MS}
    known = {"admin_token": TOKEN, "allowed_hosts": "care", "encoder": ENCODER}
    return Settings(collection=built.root, **(patient | known | values))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Starts the app as a server would, yields a client, and stops the app."""
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield client


def client_of(app: FastAPI, headers: Mapping[str, str] = AS_ADMIN) -> httpx.AsyncClient:
    """Makes a client with the administrator's token, or with the given headers."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost", headers=headers)


def _line(letter: str, entry: dict[str, Any]) -> str:
    metadata = {"kind": entry["kind"], "year": entry["year"]}
    fields = {"_id": f"{letter}-{entry['id']}", "title": entry["title"], "text": entry["text"], "metadata": metadata}
    return json.dumps(fields, ensure_ascii=False)

"""The files that a search runs through, as docs/architecture.md lists them, against those that a profiler records."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import FrameType

import httpx
import pytest

from service.updates import swap
from tests.api.live import live
from tests.api.support import Built, make_settings

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("models", "indexer", "service"))
MOST_FILES = 22


def test_the_files_of_the_search_path_are_as_documented(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "LOG_SECONDS", 3600.0)  # no polling, so that only requests run
    recorded: dict[str, None] = {}
    recording = threading.Event()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and recording.is_set() and (path := frame.f_code.co_filename).startswith(PACKAGES):
            recorded[str(Path(path).relative_to(ROOT))] = None

    threading.setprofile(record)  # applies to threads started from now on: those of the server
    try:
        with (
            live(make_settings(built, threads=1, reload_seconds=0, lru_mb=0)) as url,
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            client.post("/v1/search", json={"query": "头痛"}).raise_for_status()
            recording.set()
            for query in ("高血压吃什么药", "感冒发烧怎么办"):
                assert client.post("/v1/search", json={"query": query, "mode": "hybrid"}).json()["results"][0]["hits"]
            recording.clear()
    finally:
        threading.setprofile(None)
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = page.partition("### The walk of a POST /v1/search")[2].partition("\n### ")[0]
    assert sorted(recorded) == sorted(re.findall(r"^\| `(\S+\.py)` \|", walk, re.MULTILINE))
    assert len(recorded) <= MOST_FILES

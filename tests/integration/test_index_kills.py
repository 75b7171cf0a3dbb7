"""A few kills of a build in its own process; `make kill-index` does fifty, with the bundled encoder."""

from __future__ import annotations

from pathlib import Path

from tests.kill.index import EXAMPLES, Build, problems, run_kills


def test_killed_builds_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"".join(EXAMPLES.read_bytes().splitlines(keepends=True)[:40]))
    whole, kills = run_kills(Build(corpus, shard=8, fast=True), kills=5, seed=1, folder=tmp_path)
    assert len(kills) == 5
    assert problems(whole, kills) == []

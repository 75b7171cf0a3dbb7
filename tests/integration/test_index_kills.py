"""A build killed in its own process, again and again, ends like an undisturbed one.

Here a few kills with a stand-in for the encoder; `make kill-index` does fifty with the bundled encoder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.build_kills import EXAMPLES, Build, problems, run_kills, summary


def test_killed_builds_end_like_an_undisturbed_one(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    count, documents, seed, shard = (
        pytestconfig.getoption(f"--{name}") for name in ("kills", "documents", "seed", "shard")
    )
    fast = count is None or pytestconfig.getoption("--fast")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"".join(EXAMPLES.read_bytes().splitlines(keepends=True)[: documents or 40]))
    whole, kills = run_kills(Build(corpus, shard=shard, fast=fast), kills=count or 5, seed=seed, folder=tmp_path)
    print(f"\n{summary(whole, kills)}")
    assert len(kills) == (count or 5)
    assert problems(whole, kills) == []

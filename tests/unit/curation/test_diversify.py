"""The evolving index of diversify: it decides like a naive loop, exactly or by a graph, also after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.curation import frame
from models.curation.diversify import Diversify
from models.curation.frame import Files, run_step
from models.curation.vectors import STORED, GrowingIndex, Vectors
from models.encoder.spec import Side
from models.errors import CareError
from tests.support.curation import CircleEncoder, report_in, run_in, write_lines

ANGLES = {"问": 0.0, "近": 0.05, "答": 0.1, "一": 0.2, "远": 1.5}
NEAR = float(np.cos(0.15))


def diversified(folder: Path, rows: Sequence[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    settings = {"threshold": NEAR, "seeds": 1} | changes
    return run_in(folder, Diversify(CircleEncoder(angles=ANGLES), folder / "state", **settings), rows)


def test_a_text_similar_to_too_many_kept_texts_is_dropped(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("问", "近", "答", "一", "远")]
    assert [row["text"] for row in diversified(tmp_path, rows)] == ["问", "近", "一", "远"], (
        "答 is similar to 问 and 近"
    )
    report = report_in(tmp_path)
    assert report["dropped"] == {"like more than 1 kept rows": 1}
    assert report["clusters"]["by_size"]["1"] == 3
    assert report["clusters"]["by_size"]["2"] == 1, "答 belongs to the nearest kept text"
    assert not (tmp_path / "state").exists()


def test_queries_and_documents_are_compared_separately(tmp_path: Path) -> None:
    rows = [{"query": text, "pos": ["远"]} for text in ("问", "近", "答")] + [{"text": "没有标题"}]
    assert [row["query"] for row in diversified(tmp_path, rows, by="query")] == ["问", "近"]
    assert report_in(tmp_path)["dropped"]["no query to compare by"] == 1


@dataclass(frozen=True)
class NumberedEncoder(CircleEncoder):
    """Reads texts as row numbers of a matrix."""

    matrix: Vectors = field(default_factory=lambda: np.empty((0, 3), np.float32))

    @property
    def opened(self) -> Any:  # type: ignore[override] # noqa: ANN401
        found = super().opened
        found.spec.dim = self.matrix.shape[1]
        return found

    def read(self, texts: Sequence[str], side: Side) -> Vectors:
        return self.matrix[[int(text) for text in texts]]


def some_vectors(count: int, dim: int) -> Vectors:
    vectors = np.random.default_rng(0).normal(size=(count, dim))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(STORED).astype(np.float32)


@pytest.mark.parametrize("exact", [1000, 20])
@pytest.mark.parametrize("stop", [0, 30])
def test_it_decides_like_a_naive_loop_and_resumes_after_a_stop(
    exact: int, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Diversify, "block", 7)
    monkeypatch.setattr(frame, "SAVE_EVERY_ROWS", 5)
    vectors = some_vectors(60, 3)
    kept: list[int] = []
    for at in range(60):
        nearest = sorted((float(vectors[at] @ vectors[other]) for other in kept), reverse=True)[:5]
        if at < 4 or sum(score > 0.8 for score in nearest) <= 2:
            kept.append(at)
    assert 20 < len(kept) < 55
    encoder = NumberedEncoder(matrix=vectors)
    files = Files([write_lines(tmp_path / "rows.jsonl", [{"text": str(n)} for n in range(60)])], tmp_path / "out.jsonl")
    options = {"threshold": 0.8, "most": 2, "seeds": 4, "exact": exact}
    if stop:
        broken = Diversify(NumberedEncoder(matrix=vectors[:stop]), tmp_path / "state", **options)  # type: ignore[arg-type]
        with pytest.raises(IndexError):
            run_step(broken, files)
        assert files.position.exists()
    run_step(Diversify(encoder, tmp_path / "state", **options), files)  # type: ignore[arg-type]
    lines = files.out.read_text(encoding="utf-8").splitlines()
    assert [int(line.split('"')[3]) for line in lines] == kept
    assert report_in(tmp_path)["clusters"]["exact"] == (exact == 1000)


def test_the_graph_depends_only_on_the_order_of_the_vectors() -> None:
    vectors = some_vectors(500, 16)
    at_once, bit_by_bit = GrowingIndex(16, 0), GrowingIndex(16, 100)
    at_once.add(vectors)
    for first in range(0, 500, 33):
        bit_by_bit.add(vectors[first : first + 33])
    found = [index.nearest(vectors, 5)[1] for index in (at_once, bit_by_bit)]
    assert (found[0] == found[1]).all()
    exact = GrowingIndex(16, 1000)
    exact.add(vectors)
    assert (exact.nearest(vectors, 5)[1] == found[0]).mean() > 0.95
    assert exact.nearest(vectors[:1], 2**31 - 1)[1].shape == (1, 500), "no more than there are"


@pytest.mark.parametrize("given", [{"most": -1}, {"seeds": -1}, {"exact": -1}])
def test_negative_numbers_are_refused(given: dict[str, int], tmp_path: Path) -> None:
    """-1 stands for no neighbour in an empty index, and would count as kept."""
    with pytest.raises(CareError, match="below 0"):
        Diversify(CircleEncoder(), tmp_path, **given)  # type: ignore[arg-type]

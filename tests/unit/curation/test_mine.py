"""Mining and pooling over a whole corpus: windows, margins, known answers, lexical and dense search."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.curation.mine import Mine, Pool
from models.curation.search import Retrievers
from models.encoder.spec import Side
from models.errors import CareError
from tests.support.curation import CircleEncoder, report_in, run_in, write_lines

ANGLES = {"问": 0.0, "近": 0.05, "答": 0.1, "一": 0.2, "二": 0.3, "三": 0.4, "远": 1.5, "想": -1.5}
ROW = {"query": "问", "pos": ["答"], "source": "s"}
CORPUS = [{"text": text, "source": "s"} for text in ("近", "一", "二", "三", "答")] + [{"text": "旧", "source": "t"}]


def retrievers(
    folder: Path, corpus: Sequence[dict[str, Any]] = CORPUS, *, dense: bool = True, bm25: bool = False
) -> Retrievers:
    encoders = [CircleEncoder(angles=ANGLES)] if dense else []
    return Retrievers([write_lines(folder / "corpus.jsonl", corpus)], encoders, bm25, folder / "vectors")


def mined(folder: Path, *rows: dict[str, Any], found: Retrievers | None = None, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    step = Mine([write_lines(folder / "rows.jsonl", rows)], found or retrievers(folder), **options)
    return run_in(folder, step, rows)


def test_negatives_come_from_the_window_of_ranks_without_the_answers(tmp_path: Path) -> None:
    (row,) = mined(tmp_path, ROW, count=2, ranks=(1, 3))
    assert row == ROW | {"neg": ["一", "二"]}, "the nearest, 近, is rank 0"
    assert report_in(tmp_path)["notes"] == {"negatives mined": 2}


def test_a_margin_keeps_what_is_clearly_below_the_positive(tmp_path: Path) -> None:
    margin = float(np.cos(0.1) - np.cos(0.25))
    assert mined(tmp_path, ROW, count=9, margin=margin)[0]["neg"] == ["二", "三", "旧"]
    with pytest.raises(CareError, match="--margin compares cosines"):
        Mine([], retrievers(tmp_path, dense=False, bm25=True), margin=0.1)


def test_gold_negatives_are_kept_and_answers_of_other_rows_are_no_negatives(tmp_path: Path) -> None:
    again = {"query": "问", "pos": ["近"]}
    rows = mined(tmp_path, ROW | {"neg": ["一", "别处"]}, again, count=1, ranks=(0, 1))
    assert rows[0]["neg"] == ["一", "别处", "二"]
    assert rows[1]["neg"] == ["一"]


def test_a_row_may_search_only_its_own_source(tmp_path: Path) -> None:
    assert mined(tmp_path, ROW, count=9)[0]["neg"] == ["近", "一", "二", "三", "旧"]
    (tmp_path / "out.jsonl").unlink()
    assert mined(tmp_path, ROW, count=9, within="source")[0]["neg"] == ["近", "一", "二", "三"]
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(CareError, match="no document of 'x'"):
        mined(tmp_path, ROW | {"source": "x"}, within="source")


def test_rows_without_a_source_are_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = write_lines(tmp_path / "own" / "rows.jsonl", [{"text": "近"}, {"text": "答"}])
    searched = Retrievers([own, *retrievers(tmp_path).corpus_files], [CircleEncoder(angles=ANGLES)], False, tmp_path)
    row = {"query": "问", "pos": ["答"]}
    made = {**row, "neg": ["近"], "source": "rows"}
    assert mined(tmp_path, row, found=searched, within="source", count=9) == [made]


def test_a_query_is_searched_with_its_hypothetical_document(tmp_path: Path) -> None:
    (row,) = mined(tmp_path, ROW | {"query": "远", "hypothetical": ["想"]}, count=1, ranks=(0, 1))
    assert row["neg"] == ["近"], "between 1.5 and -1.5 lies 0"


def test_rows_whose_positive_the_encoder_does_not_find_are_dropped(tmp_path: Path) -> None:
    rows = mined(tmp_path, ROW, {"query": "问", "pos": ["三"]}, {"text": "没有标题"}, consistent=2)
    assert [row["pos"] for row in rows] == [["答"]]
    assert report_in(tmp_path)["dropped"]["no positive among the first 2"] == 1


WORDS = [{"text": text} for text in ("近义", "头痛吃药", "远方头痛", "答")]


def test_bm25_finds_what_the_encoder_misses_and_both_are_fused(tmp_path: Path) -> None:
    row = {"query": "头痛", "pos": ["答"]}
    words = retrievers(tmp_path, WORDS, dense=False, bm25=True)
    assert sorted(mined(tmp_path, row, found=words)[0]["neg"]) == sorted(["头痛吃药", "远方头痛"])
    (tmp_path / "out.jsonl").unlink()
    both = retrievers(tmp_path, WORDS, bm25=True)
    assert set(mined(tmp_path, row, found=both)[0]["neg"]) == {"近义", "头痛吃药", "远方头痛"}


def test_the_draw_is_the_same_in_every_run(tmp_path: Path) -> None:
    rows = [ROW | {"query": f"问{n}"} for n in range(20)]
    first = mined(tmp_path, *rows, count=2)
    (tmp_path / "out.jsonl").unlink()
    assert mined(tmp_path, *rows, count=2) == first
    assert len({tuple(row["neg"]) for row in first}) > 1


def test_a_pool_joins_the_hits_of_all_systems_and_keeps_labels_apart(tmp_path: Path) -> None:
    both = retrievers(tmp_path, WORDS, bm25=True)
    rows = run_in(tmp_path, Pool(both, depth=1), [{"text": "问头痛", "id": 3}, {"query": "近", "pos": ["答"]}])
    assert rows[0]["query"] == "问头痛"
    assert rows[0]["id"] == 3
    assert len(rows[0]["pos"]) == 2, "one of the encoder, one of BM25"
    assert rows[1] == {"query": "近", "pos": ["答"], "neg": ["近义"]}


def test_mining_needs_at_least_one_retriever(tmp_path: Path) -> None:
    with pytest.raises(CareError, match="--encoder FOLDER, --bm25 or both"):
        retrievers(tmp_path, dense=False)


def test_vectors_are_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in "甲乙丙"])
    found = Retrievers([corpus], [CircleEncoder()], False, tmp_path / "vectors")
    path = tmp_path / "vectors" / f"circle-{found.corpus.digest}.f16"
    path.parent.mkdir()
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CareError, match="another process writes it"):
            _ = found.dense
    path.write_bytes(b"\0" * 4 * 5)  # as two concurrent writers may have left it
    assert found.dense[0].vectors.tolist() == CircleEncoder().read("甲乙丙", Side.DOCUMENT).tolist()

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.encoder.spec import Side
from models.errors import BadData
from models.training import mining
from models.training.encoders import EncoderStore
from models.training.mining import diversify, filter_pairs, mine, spread
from models.training.ranks import Ranks
from models.training.recipe import Diversify, Filter, Mine, Recipe
from tests.support.toy_training import write_rows

ONE = Ranks(0, 1, torch.device("cpu"))
ANGLES = {"问": 0.0, "答": 0.1, "近": 0.05, "一": 0.2, "二": 0.3, "三": 0.4, "远": 1.5, "想": -1.5}
ROW = {"query": "问", "pos": ["答"], "neg": [], "source": "s"}
OTHERS = [{"query": text, "pos": [text], "source": "s"} for text in ("近", "一", "二", "三")]
FAR = {"query": "远", "pos": ["答"], "source": "t", "instruction": "找：", "neg": ["旧"]}


@pytest.fixture(autouse=True)
def _flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts lie on a circle, at known angles."""

    def read(name: str, texts, *rest: object) -> np.ndarray:  # noqa: ANN001
        angles = np.array([ANGLES.get(text, 1.0) for text in texts.texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    monkeypatch.setattr(mining, "read_once", read)


@pytest.fixture
def run(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> Callable[..., tuple[dict[str, int], list[dict]]]:
    def run(
        stage: Mine | Filter | Diversify, *rows: dict[str, object], corpus: tuple[dict[str, object], ...] = ()
    ) -> tuple[dict[str, int], list[dict]]:
        given = [[write_rows(tmp_path / "in.jsonl", rows)], tmp_path / "out.jsonl"]
        work = {Mine: mine, Filter: filter_pairs, Diversify: diversify}[type(stage)]
        if corpus:
            given.append([write_rows(tmp_path / "corpus.jsonl", corpus)])
        facts = work(EncoderStore(toy_recipe(), tmp_path, ONE), stage, *given)  # type: ignore[arg-type]
        return facts, [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return run


def a_mine(**changes: object) -> Mine:
    return Mine.model_validate({"kind": "mine", "files": ["x"], "query": "query"} | changes)


def test_negatives_come_from_the_window_of_ranks_without_the_answers(run) -> None:  # noqa: ANN001
    _, rows = run(a_mine(count=2, ranks=(1, 3)), ROW, *OTHERS)
    assert rows[0]["neg"] == ["一", "二"], "the nearest, 近, is rank 0"


def test_a_margin_keeps_what_is_clearly_below_the_positive(run) -> None:  # noqa: ANN001
    margin = float(np.cos(0.1) - np.cos(0.25))
    _, rows = run(a_mine(count=9, ranks=(0, 9), margin=margin), ROW, *OTHERS)
    assert rows[0]["neg"] == ["二", "三"]


def test_negatives_come_from_the_documents_of_all_sources(run) -> None:  # noqa: ANN001
    _, rows = run(a_mine(count=9, ranks=(0, 9)), ROW, *OTHERS, FAR)
    assert rows[0]["neg"] == ["近", "一", "二", "三", "旧"], "旧 is a document of another source"


def test_negatives_that_a_row_has_stay_and_mined_ones_are_added(run) -> None:  # noqa: ANN001
    facts, rows = run(a_mine(count=2, ranks=(0, 2)), ROW | {"neg": ["近", "远"]}, *OTHERS)
    assert rows[0]["neg"] == ["近", "远", "一", "二"], "what the row has is not mined again"
    assert facts["negatives"] == 2 + 4 * 2


def test_negatives_come_from_the_corpus_if_one_is_given(run) -> None:  # noqa: ANN001
    corpus = ({"text": "三", "source": "s"}, {"text": "答", "source": "s"}, {"text": "远", "source": "t"})
    _, rows = run(a_mine(count=9, ranks=(0, 9)), ROW, *OTHERS, corpus=corpus)
    assert rows[0]["neg"] == ["三", "远"], "neither the answer nor documents of the rows"
    _, rows = run(a_mine(count=9, ranks=(0, 9), within="source"), ROW, *OTHERS, corpus=corpus)
    assert rows[0]["neg"] == ["三"]


def test_a_source_without_documents_in_the_corpus_is_named(run) -> None:  # noqa: ANN001
    with pytest.raises(BadData, match="within: the corpus has no document of 's', only of t"):
        run(a_mine(within="source"), ROW, corpus=({"text": "远", "source": "t"},))


def test_a_source_is_searched_within_itself_and_others_pass(run) -> None:  # noqa: ANN001
    facts, rows = run(a_mine(count=9, ranks=(0, 9), sources=["s"], within="source"), ROW, *OTHERS, FAR)
    assert rows[-1] == FAR | {"neg": ["旧"]}
    assert "旧" not in rows[0]["neg"]
    assert facts == {"pairs": 6, "mined": 5, "negatives": 20}


def test_what_another_row_calls_an_answer_is_no_negative(run) -> None:  # noqa: ANN001
    again = ROW | {"pos": ["近"], "source": "elsewhere"}
    _, rows = run(a_mine(count=1, ranks=(0, 1)), ROW, *OTHERS, again)
    assert rows[0]["neg"] == ["一"]


def test_a_source_that_no_row_is_of_is_named(run) -> None:  # noqa: ANN001
    with pytest.raises(BadData, match="sources: no row is of 'x'; the files have s, t"):
        run(a_mine(sources=["x"]), ROW, FAR)


def test_only_one_side_is_read_where_only_one_is_compared(run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    read, seen = mining.read_once, []
    monkeypatch.setattr(mining, "read_once", lambda *given: (seen.append(given[1].side), read(*given))[1])
    stage = {"kind": "diversify", "files": ["x"], "query": "query", "side": "query", "threshold": 0.9}
    run(Diversify.model_validate(stage), ROW, *OTHERS)
    assert seen == [Side.QUERY]


def test_the_first_rank_alone_writes(tmp_path: Path) -> None:
    mining.write_pairs(tmp_path / "out.jsonl", Ranks(1, 2, torch.device("cpu")), iter([]))
    assert not list(tmp_path.iterdir())


def test_a_query_searches_together_with_its_imagined_document(run) -> None:  # noqa: ANN001
    _, rows = run(a_mine(count=1, ranks=(0, 1)), ROW | {"query": "远", "hypothetical": ["想"]}, *OTHERS)
    assert rows[0]["neg"] == ["近"], "between 1.5 and -1.5 lies 0"
    assert rows[0]["hypothetical"] == ["想"]


def test_pairs_stay_that_the_encoder_finds_itself(run) -> None:  # noqa: ANN001
    stage = Filter.model_validate({"kind": "filter", "files": ["x"], "query": "query", "top": 2})
    facts, rows = run(stage, ROW, ROW | {"pos": ["三"]}, *OTHERS)
    assert facts == {"pairs": 6, "kept": 5}
    assert [row["pos"] for row in rows[:2]] == [["答"], ["近"]]


def test_a_row_like_too_many_that_are_kept_is_dropped(run) -> None:  # noqa: ANN001
    settings = {"kind": "diversify", "files": ["x"], "query": "query", "side": "query", "seeds": 1}
    near = float(np.cos(0.15))
    stage = Diversify.model_validate(settings | {"threshold": near, "most": 1})
    # Angles 0, 0.05, 0.1 (like two that are kept), 0.2 (like one), 1.5.
    asked = [{"query": text, "pos": [text], "source": "s"} for text in ("问", "近", "答", "一", "远")]
    facts, rows = run(stage, *asked)
    assert [row["query"] for row in rows] == ["问", "近", "一", "远"]
    assert facts == {"pairs": 5, "kept": 4}


def test_documents_are_filtered_apart_from_queries(run) -> None:  # noqa: ANN001
    """A near-duplicate document leaves the corpus; every query that it answers stays in its own file."""
    settings = {"kind": "diversify", "files": ["x"], "query": "query", "seeds": 1, "threshold": float(np.cos(0.15))}
    documents = ({"text": text, "source": "c"} for text in ("问", "近", "答", "一", "远", "问"))
    facts, rows = run(Diversify.model_validate(settings | {"side": "document"}), *documents)
    assert rows == [{"text": text, "source": "c"} for text in ("问", "近", "一", "远")]
    assert facts == {"documents": 5, "kept": 4}
    asked = [{"query": text, "pos": ["答"], "neg": [], "source": "s"} for text in ("问", "远")]
    _, rows = run(Diversify.model_validate(settings | {"side": "query"}), *asked)
    assert rows == asked


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_spreading_equals_a_naive_loop_whatever_the_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mining, "QUERIES_AT_ONCE", block)
    vectors = torch.nn.functional.normalize(torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    kept: list[int] = []
    for at in range(60):
        nearest = sorted((float(vectors[at] @ vectors[other]) for other in kept), reverse=True)[:5]
        if at < 4 or sum(score > 0.8 for score in nearest) <= 2:
            kept.append(at)
    assert 10 < len(kept) < 55
    assert np.flatnonzero(spread(vectors, 5, 0.8, 2, 4)).tolist() == kept

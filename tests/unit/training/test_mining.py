import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.errors import BadData
from models.training import mining
from models.training.encoders import EncoderStore
from models.training.mining import mine
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.stages import Mine
from tests.support.toy_training import ONE, write_rows

ANGLES = {"问": 0.0, "答": 0.1, "近": 0.05, "一": 0.2, "二": 0.3, "三": 0.4, "远": 1.5, "想": -1.5}
ROW = {"query": "问", "pos": ["答"], "neg": [], "source": "s"}
OTHERS = [{"query": text, "pos": [text], "source": "s"} for text in ("近", "一", "二", "三")]
FAR = {"query": "远", "pos": ["答"], "source": "t", "instruction": "找：", "neg": ["旧"]}


@pytest.fixture(autouse=True)
def _flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts texts on a circle, at known angles."""

    def read(name: str, texts, *rest: object) -> torch.Tensor:  # noqa: ANN001
        angles = torch.tensor([ANGLES.get(text, 1.0) for text in texts.texts])
        return torch.stack([angles.cos(), angles.sin()], dim=1)

    monkeypatch.setattr(mining, "read_once", read)


@pytest.fixture
def run(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> Callable[..., tuple[dict[str, int], list[dict]]]:
    def run(
        stage: Mine, *rows: dict[str, object], corpus: tuple[dict[str, object], ...] = ()
    ) -> tuple[dict[str, int], list[dict]]:
        given = [[write_rows(tmp_path / "in.jsonl", rows)], tmp_path / "out.jsonl"]
        if corpus:
            given.append([write_rows(tmp_path / "corpus.jsonl", corpus)])
        facts = mine(EncoderStore(toy_recipe(), tmp_path, ONE), stage, *given)  # type: ignore[arg-type]
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


def test_existing_negatives_are_kept_and_mined_ones_are_added(run) -> None:  # noqa: ANN001
    facts, rows = run(a_mine(count=2, ranks=(0, 2)), ROW | {"neg": ["近", "远"]}, *OTHERS)
    assert rows[0]["neg"] == ["近", "远", "一", "二"], "negatives of the row are not mined again"
    assert facts["negatives"] == 2 + 4 * 2


def test_negatives_come_from_the_corpus_if_one_is_given(run) -> None:  # noqa: ANN001
    corpus = ({"text": "三", "source": "s"}, {"text": "答", "source": "s"}, {"text": "远", "source": "t"})
    _, rows = run(a_mine(count=9, ranks=(0, 9)), ROW, *OTHERS, corpus=corpus)
    assert rows[0]["neg"] == ["三", "远"], "neither the answer nor documents of the rows"
    _, rows = run(a_mine(count=9, ranks=(0, 9), within="source"), ROW, *OTHERS, corpus=corpus)
    assert rows[0]["neg"] == ["三"]


@pytest.mark.parametrize("key", ["sample", "halves"])
def test_a_share_of_an_unknown_source_is_refused(run, key: str) -> None:  # noqa: ANN001
    with pytest.raises(BadData, match=f"{key}: no row is of typo; the files have s"):
        run(a_mine(**{key: {"typo": 0.5, "gone": 0.0, "*": 1.0}}), ROW)


def test_a_corpus_without_documents_is_refused(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> None:
    rows, corpus = write_rows(tmp_path / "in.jsonl", [ROW]), write_rows(tmp_path / "corpus.jsonl", [])
    with pytest.raises(BadData, match="corpus: the files hold no documents"):
        mine(EncoderStore(toy_recipe(), tmp_path, ONE), a_mine(), [rows], tmp_path / "out.jsonl", [corpus])


def test_a_source_without_documents_in_the_corpus_is_named(run) -> None:  # noqa: ANN001
    with pytest.raises(BadData, match="within: the corpus has no document of 's', only of t"):
        run(a_mine(within="source"), ROW, corpus=({"text": "远", "source": "t"},))


def test_a_source_can_be_searched_within_itself_and_others_are_unchanged(run) -> None:  # noqa: ANN001
    facts, rows = run(a_mine(count=9, ranks=(0, 9), sources=["s"], within="source"), ROW, *OTHERS, FAR)
    assert rows[-1] == FAR | {"neg": ["旧"]}
    assert "旧" not in rows[0]["neg"]
    assert facts == {"pairs": 6, "mined": 5, "negatives": 20}


def test_answers_of_other_rows_are_no_negatives(run) -> None:  # noqa: ANN001
    again = ROW | {"pos": ["近"], "source": "elsewhere"}
    _, rows = run(a_mine(count=1, ranks=(0, 1)), ROW, *OTHERS, again)
    assert rows[0]["neg"] == ["一"]


def test_a_source_without_rows_is_named(run) -> None:  # noqa: ANN001
    with pytest.raises(BadData, match="sources: no row is of 'x'; the files have s, t"):
        run(a_mine(sources=["x"]), ROW, FAR)


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    mining.write_pairs(tmp_path / "out.jsonl", Ranks(1, 2, torch.device("cpu")), iter([]))
    assert not list(tmp_path.iterdir())


def test_a_query_is_searched_with_its_hypothetical_document(run) -> None:  # noqa: ANN001
    _, rows = run(a_mine(count=1, ranks=(0, 1)), ROW | {"query": "远", "hypothetical": ["想"]}, *OTHERS)
    assert rows[0]["neg"] == ["近"], "between 1.5 and -1.5 lies 0"
    assert rows[0]["hypothetical"] == ["想"]

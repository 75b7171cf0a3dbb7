import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.training import mining
from models.training.mining import filter_pairs, mine
from models.training.ranks import Ranks
from models.training.recipe import Filter, Mine, Recipe
from tests.support.toy_training import write_rows

ONE = Ranks(0, 1, torch.device("cpu"))
ANGLES = {"问": 0.0, "答": 0.1, "近": 0.05, "一": 0.2, "二": 0.3, "三": 0.4, "远": 1.5, "想": -1.5}
ROW = {"query": "问", "pos": ["答"], "neg": [], "source": "s"}
OTHERS = [{"query": text, "pos": [text], "source": "s"} for text in ("近", "一", "二", "三")]
FAR = {"query": "远", "pos": ["答"], "source": "t", "instruction": "找：", "neg": ["旧"]}


@pytest.fixture(autouse=True)
def _flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts lie on a circle, at known angles."""

    def read(self: mining.Searcher, name: str, texts) -> np.ndarray:  # noqa: ANN001
        angles = np.array([ANGLES.get(text, 1.0) for text in texts.texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    monkeypatch.setattr(mining.Searcher, "_read", read)


@pytest.fixture
def run(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> Callable[..., tuple[dict[str, int], list[dict]]]:
    def run(stage: Mine | Filter, *rows: dict[str, object]) -> tuple[dict[str, int], list[dict]]:
        files = [write_rows(tmp_path / "in.jsonl", rows)]
        work = mine if isinstance(stage, Mine) else filter_pairs
        facts = work(toy_recipe(), stage, files, None, tmp_path, ONE, tmp_path / "out.jsonl")  # type: ignore[arg-type]
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


def test_a_source_is_searched_within_itself_and_others_pass(run) -> None:  # noqa: ANN001
    facts, rows = run(a_mine(count=9, ranks=(0, 9), sources=["s"]), ROW, *OTHERS, FAR)
    assert rows[-1] == FAR | {"neg": ["旧"]}
    assert "旧" not in rows[0]["neg"]
    assert facts == {"pairs": 6, "mined": 5, "negatives": 20}


def test_a_query_searches_together_with_its_imagined_document(run) -> None:  # noqa: ANN001
    _, rows = run(a_mine(count=1, ranks=(0, 1)), ROW | {"query": "远", "hypothetical": ["想"]}, *OTHERS)
    assert rows[0]["neg"] == ["近"], "between 1.5 and -1.5 lies 0"
    assert rows[0]["hypothetical"] == ["想"]


def test_pairs_stay_that_the_encoder_finds_itself(run) -> None:  # noqa: ANN001
    stage = Filter.model_validate({"kind": "filter", "files": ["x"], "query": "query", "top": 2})
    facts, rows = run(stage, ROW, ROW | {"pos": ["三"]}, *OTHERS)
    assert facts == {"pairs": 6, "kept": 5}
    assert [row["pos"] for row in rows[:2]] == [["答"], ["近"]]

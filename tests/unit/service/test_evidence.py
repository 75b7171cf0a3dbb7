"""What stands behind a ranking, on rows made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from models.fusion import LATER_DENSE, LATER_LEXICAL, Fusion, Mode, query_weight
from models.lexical import Ranking
from service.engine.jobs import Evidence, Options
from service.search.results import Account, account_for
from service.serving.serving import Serving

# Document 0 has passages 0 to 2, document 1 passage 3, document 2 passages 4 and 5.
DOCUMENTS = np.array([0, 0, 0, 1, 2, 2], np.int32)
SERVING = cast(Serving, SimpleNamespace(documents_of=lambda passages: DOCUMENTS[passages]))


def ranking(*pairs: tuple[int, float]) -> Ranking:
    rows, scores = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(rows, np.int64), np.array(scores, np.float32)


DENSE = ranking((4, 0.9), (1, 0.8), (5, 0.7), (0, 0.5), (3, 0.4))
LEXICAL = ranking((1, 10.0), (2, 5.0), (4, 1.0))


def account(mode: Mode, fusion: Fusion = Fusion.SCORES, weight: float | None = None) -> Account:
    options = Options(mode, 10, fusion=fusion, weight=weight, evidence=True)
    return account_for(SERVING, options, Evidence(DENSE, LEXICAL))


def test_a_document_is_placed_by_its_best_passage() -> None:
    found = account(Mode.HYBRID)
    assert {row: rank for row, (rank, _) in found.dense.items()} == {2: 1, 0: 2, 1: 3}
    # The best passage of document 0 is not its first, so it counts less.
    assert found.dense[0][1] == pytest.approx(LATER_DENSE * 0.8)
    assert found.lexical == {0: (1, pytest.approx(LATER_LEXICAL * 10.0)), 2: (2, 1.0)}


@pytest.mark.parametrize(("mode", "expected"), [(Mode.DENSE, [1, 0]), (Mode.LEXICAL, [1, 2])])
def test_passages_of_one_side_stand_in_its_order(mode: Mode, expected: list[int]) -> None:
    assert [row for row, _ in account(mode).passages[0]] == expected


def test_passages_of_both_sides_are_fused_with_the_documents_weight() -> None:
    found = account(Mode.HYBRID, weight=0.5)
    assert found.weight == 0.5
    passages = dict(found.passages[0])
    assert passages[1] == pytest.approx(0.5 * 0.8 + 0.5 * 1.0, abs=1e-6)
    assert passages[2] == pytest.approx(0.25, abs=1e-6)
    assert [row for row, _ in found.passages[0]] == [1, 2, 0]


def test_the_weight_is_the_one_that_the_documents_were_fused_with() -> None:
    best = np.array([0.9, LATER_DENSE * 0.8, 0.4], np.float32), np.array([LATER_LEXICAL * 10.0, 1.0], np.float32)
    assert account(Mode.HYBRID).weight == pytest.approx(query_weight(*best))
    assert account(Mode.HYBRID, fusion=Fusion.RECIPROCAL).weight is None
    assert account(Mode.DENSE).weight is None


def test_evidence_of_no_hits_is_empty() -> None:
    found = account_for(SERVING, Options(Mode.HYBRID, 10), Evidence(ranking(), ranking()))
    assert (found.dense, found.lexical, found.passages) == ({}, {}, {})

"""Evidence of a ranking, and the passage shown of a document, on hand-made rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from indexer.store.documents import StoredDocument
from models.fusion import LATER_DENSE, LATER_LEXICAL, Fusion, Mode, query_weight
from models.lexical import LexicalIndex, Ranking
from service.engine.jobs import Evidence, Options
from service.search.evidence import Account, account_for, divide_words
from service.search.results import marked_terms, passage_of
from service.serving.serving import Serving

# Document 0 has passages 0 to 2, document 1 passage 3, document 2 passages 4 and 5.
DOCUMENTS = np.array([0, 0, 0, 1, 2, 2], np.int32)
SERVING = cast(Serving, SimpleNamespace(overlay=SimpleNamespace(documents_of=lambda passages: DOCUMENTS[passages])))


def ranking(*pairs: tuple[int, float]) -> Ranking:
    rows, scores = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(rows, np.int64), np.array(scores, np.float32)


DENSE = ranking((4, 0.9), (1, 0.8), (5, 0.7), (0, 0.5), (3, 0.4))
LEXICAL = ranking((1, 10.0), (2, 5.0), (4, 1.0))


def account(mode: Mode, fusion: Fusion = Fusion.SCORES, weight: float | None = None) -> Account:
    options = Options(mode, 10, fusion=fusion, weight=weight, evidence=True)
    return account_for(SERVING, options, Evidence(DENSE, LEXICAL), LEXICAL)


def test_a_document_is_placed_by_its_best_passage() -> None:
    found = account(Mode.HYBRID)
    assert {row: rank for row, (rank, _) in found.dense.items()} == {2: 1, 0: 2, 1: 3}
    # The best passage of document 0 is not its first, so it counts less.
    assert found.dense[0][1] == pytest.approx(LATER_DENSE * 0.8)
    assert found.lexical == {0: (1, pytest.approx(LATER_LEXICAL * 10.0)), 2: (2, 1.0)}


@pytest.mark.parametrize(("mode", "expected"), [(Mode.DENSE, [1, 0]), (Mode.LEXICAL, [1, 2])])
def test_passages_in_dense_or_lexical_mode_are_in_that_modes_order(mode: Mode, expected: list[int]) -> None:
    assert [row for row, _ in account(mode).passages[0]] == expected


def test_passages_in_hybrid_mode_are_fused_with_the_documents_weight() -> None:
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
    found = account_for(SERVING, Options(Mode.HYBRID, 10), Evidence(ranking(), ranking()), ranking())
    assert (found.dense, found.lexical, found.passages) == ({}, {}, {})


# Document 0 has four passages of twelve characters, document 1 one.
TEXTS = [
    "感冒时请多休息多喝水吧。" + "高血压患者要按时服药的。" + "头痛发热怎么办才好呢？？" + "头痛的人可以先去休息的。",
    "头痛。",
]
WHOLE = cast(
    Serving,
    SimpleNamespace(
        snapshot=SimpleNamespace(lexical=LexicalIndex.build(TEXTS, rows=[0, 4])),
        overlay=SimpleNamespace(
            documents_of=lambda rows: np.where(rows < 4, 0, 1),
            passages_of=lambda document: range(4) if document == 0 else range(4, 5),
            span=lambda row: (12 * (row % 4), 12 * (row % 4) + 12),
            document=lambda row: StoredDocument.of(str(row), "", TEXTS[row], {}),
        ),
    ),
)


@pytest.mark.parametrize(
    ("query", "found", "shown"),
    [("头痛发热", 0, 2), ("头痛", 0, 2), ("头痛", 3, 3), ("糖尿病", 1, 1), ("休息", 1, 0), ("头痛 休息", 0, 3)],
)
def test_the_passage_with_most_query_words_is_shown_and_a_tie_goes_to_the_one_found(
    query: str, found: int, shown: int
) -> None:
    assert passage_of(WHOLE, 0, TEXTS[0], found, marked_terms(query)) == shown
    assert passage_of(WHOLE, 0, TEXTS[0], found, []) == found
    assert passage_of(WHOLE, 1, TEXTS[1], 4, marked_terms(query)) == 4


def test_the_score_of_a_whole_document_is_divided_among_its_passages() -> None:
    lexical = WHOLE.snapshot.lexical.search("头痛发热", 10)
    assert sorted(lexical[0].tolist()) == [0, 4]
    scores = dict(zip(*(part.tolist() for part in lexical), strict=True))
    rows, shares = divide_words(WHOLE, lexical, [0, 1], "头痛发热")
    divided = dict(zip(rows.tolist(), shares.tolist(), strict=True))
    assert set(divided) == {2, 3, 4}
    assert divided[2] == pytest.approx(scores[0])
    assert 0 < divided[3] < divided[2]
    assert divided[4] == pytest.approx(scores[4])
    assert (np.diff(shares) <= 0).all()
    only_first = divide_words(WHOLE, lexical, [1], "头痛发热")  # the document that is not shown is unchanged
    assert [part.tolist() for part in only_first] == [part.tolist() for part in lexical]


def test_many_documents_with_the_words_are_not_compared_with_each_other() -> None:
    """Thousands may be found if as many were posted since the build, and the event loop waits for this."""

    class Owner(int):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Owner.compared += 1
            return super().__eq__(other)

        __hash__ = int.__hash__

    owners = [Owner(number) for number in range(300)]
    overlay = SimpleNamespace(documents_of=lambda _: SimpleNamespace(tolist=lambda: owners))
    serving = cast(Serving, SimpleNamespace(snapshot=WHOLE.snapshot, overlay=overlay))
    divide_words(serving, ranking(*((number, 1.0) for number in range(300))), [], "头痛")
    assert Owner.compared < 300


def test_a_document_is_parsed_once_for_all_its_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = StoredDocument.text.fget

    def counted(stored: StoredDocument) -> str:
        parsed.append(stored.text_json)
        assert parse is not None
        return parse(stored)

    monkeypatch.setattr(StoredDocument, "text", property(counted))
    divide_words(WHOLE, WHOLE.snapshot.lexical.search("头痛发热", 10), [0, 1], "头痛发热")
    assert len(parsed) == 1

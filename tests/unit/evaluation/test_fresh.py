"""The score of fresh documents: read by the query encoder, corrected, among documents of the other encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from models.encoder.spec import Side
from models.evaluation.encoders import OpenEncoder
from models.evaluation.readers import EncoderReader, PairReader
from models.evaluation.sets import Kind, RetrievalSet, Task, plain_task
from models.evaluation.systems import DEPTH, Answers, Dense, NotApplicable, WithFresh, a_tenth, fresh_systems
from tests.support.evaluation import PETS, RERANK, RETRIEVAL, TableEncoder, a_spec

DIM, DOCUMENTS = 64, 300
NAMES = [f"d{number}" for number in range(DOCUMENTS)]
# The text of each query equals that of its first answer; d10 is unrelated to both.
CORPUS = RetrievalSet(
    "corpus",
    NAMES,
    [f"文{number}" for number in range(DOCUMENTS)],
    ["q1", "q2"],
    ["文7", "文9"],
    {"q1": {"d7": 1, "d8": 0}, "q2": {"d9": 2, "d10": 1}},
)
TASK: Task = plain_task("zoo", CORPUS, Kind.RETRIEVAL)


def meaning(text: str) -> NDArray[np.float32]:
    """Returns a separate direction for every text, with the first dimension left free."""
    drawn = np.random.default_rng(list(text.encode())).standard_normal(DIM - 1)
    return np.array([0.0, *drawn], np.float32)


def reader(name: str, side: Side, bias: float, instruction: str = "") -> EncoderReader:
    """Makes an encoder of one side whose vectors are all shifted towards the first dimension."""

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.array([meaning(text.removeprefix(instruction)) for text in texts])
        vectors[:, 0] += bias
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    spec = a_spec(dim=DIM, query_instruction=instruction).model_copy(update={"sides": (side,)})
    return EncoderReader(OpenEncoder(name, spec, name, 1, encode), None)


# The query encoder is shifted and the document encoder is not: vectors of the former are nearer to queries.
PAIR = PairReader(reader("query", Side.QUERY, 12.0, "问:"), reader("document", Side.DOCUMENT, 0.0))


def scores_of(rankings: Answers, query: int) -> dict[int, float]:
    assert isinstance(rankings, list)
    rows, scores = rankings[query]
    return dict(zip(rows.tolist(), scores.tolist(), strict=True))


def uncorrected(row: int, query: int) -> float:
    """Returns the score of a fresh document as the query encoder reads it."""
    vectors = PAIR.query.read([CORPUS.documents[row], CORPUS.queries[query]], Side.QUERY, TASK)
    return float(vectors[0] @ vectors[1])


def test_corrected_fresh_answers_score_like_indexed_ones() -> None:
    assert CORPUS.answers() == [[7], [9, 10]]
    indexed = Dense(PAIR)
    before, after = indexed.answer(TASK), WithFresh(indexed, PAIR, "answers fresh", RetrievalSet.answers).answer(TASK)
    for query, rows in enumerate(CORPUS.answers()):
        known, found = scores_of(before, query), scores_of(after, query)
        kept = {row: score for row, score in found.items() if row in known and row not in rows}
        assert len(kept) >= DEPTH - 2 * len(rows)
        assert kept == {row: pytest.approx(known[row]) for row in kept}
        assert uncorrected(rows[0], query) > known[rows[0]] + 0.3
        assert found[rows[0]] == pytest.approx(known[rows[0]], abs=0.1)
    # Without correction, even an unrelated fresh document is nearer than the indexed answer.
    assert uncorrected(10, 1) > scores_of(before, 1)[9]
    assert scores_of(after, 1).get(10, 0.0) < scores_of(before, 1)[9]


def test_the_fresh_tenth_is_the_same_for_all_queries_and_chosen_by_id() -> None:
    first, second = a_tenth(CORPUS)
    assert first == second
    assert len(first) == DOCUMENTS // 10
    assert len(a_tenth(PETS)[0]) == 1
    backwards = replace(CORPUS, document_ids=NAMES[::-1])
    assert {backwards.document_ids[row] for row in a_tenth(backwards)[0]} == {NAMES[row] for row in first}


def test_a_fresh_tenth_of_the_documents_makes_a_tenth_of_the_hits() -> None:
    fresh = WithFresh(Dense(PAIR), PAIR, "a tenth fresh", a_tenth).answer(TASK)
    chosen = a_tenth(CORPUS)[0]
    for query in range(2):
        assert len(set(chosen) & scores_of(fresh, query).keys()) < DEPTH / 5
    # Without correction, they would rank first.
    found = scores_of(Dense(PAIR).answer(TASK), 0)
    assert min(uncorrected(row, 0) for row in chosen) > sorted(found.values())[-2]


def test_one_encoder_for_both_sides_is_not_corrected() -> None:
    one = TableEncoder().opened()
    pair = PairReader(EncoderReader(one, None), EncoderReader(one, None))
    indexed = Dense(pair)
    for system in fresh_systems(indexed):
        for (rows, scores), (before, known) in zip(system.answer(RETRIEVAL), indexed.answer(RETRIEVAL), strict=True):
            assert rows.tolist() == before.tolist()
            assert scores.tolist() == known.tolist()


def test_a_pair_has_two_fresh_systems_and_a_single_encoder_has_none() -> None:
    names = [system.facts.name for system in fresh_systems(Dense(PAIR))]
    assert names == ["query + document, answers fresh", "query + document, a tenth fresh"]
    assert list(fresh_systems(Dense(EncoderReader(TableEncoder().opened(), None)))) == []


def test_reranking_tasks_have_no_fresh_documents() -> None:
    with pytest.raises(NotApplicable, match="searched"):
        WithFresh(Dense(PAIR), PAIR, "answers fresh", RetrievalSet.answers).answer(RERANK)

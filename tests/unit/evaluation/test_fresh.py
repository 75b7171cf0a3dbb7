"""What a fresh document loses: its answers read by the query encoder, the rest by the document encoder, or all so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from models.evaluation.encoders import OpenEncoder
from models.evaluation.fresh import FreshAnswers, StandIn, fresh_systems
from models.evaluation.readers import EncoderReader, PairReader
from models.evaluation.sets import RetrievalSet
from models.evaluation.systems import Dense, NotApplicable
from models.spec import Side
from tests.support.evaluation import PETS, RERANK, RETRIEVAL, TableEncoder, a_spec

# Queries are near 猫 by either encoder, but the query encoder takes the document 猫 for a dog.
QUERY_TABLE = {"问:小猫": (1.0, 0.0), "问:小狗": (0.6, 0.8), "问:猫": (0.0, 1.0), "问:狗": (0.8, 0.6)}
DOCUMENT_TABLE = {"猫": (1.0, 0.0), "狗": (0.6, 0.8)}


def reader(table: Mapping[str, tuple[float, float]], sides: tuple[Side, ...]) -> EncoderReader:
    def encode(texts: Sequence[str]) -> np.ndarray:
        return np.array([table[text] for text in texts], np.float32)

    instruction = "问:" if sides == (Side.QUERY,) else ""
    spec = a_spec(query_instruction=instruction).model_copy(update={"sides": sides})
    return EncoderReader(OpenEncoder("-".join(sides), spec, str(sides), 1, encode), None)


PAIR = PairReader(reader(QUERY_TABLE, (Side.QUERY,)), reader(DOCUMENT_TABLE, (Side.DOCUMENT,)))


def best(answers: object) -> list[int]:
    return [int(rows[0]) for rows, _ in answers]  # type: ignore[attr-defined]


def test_only_the_answers_are_fresh() -> None:
    indexed = Dense(PAIR)
    assert isinstance(RETRIEVAL.data, RetrievalSet)
    assert all(grades == {"d1": 1} for grades in PETS.qrels.values())
    assert best(indexed.answer(RETRIEVAL)) == [0, 1]
    # The answer is document 0 for both queries: q1 loses it, and q2, which it was far from, finds it.
    rankings = FreshAnswers(indexed, PAIR).answer(RETRIEVAL)
    assert [dict(zip(rows.tolist(), scores.tolist(), strict=True)) for rows, scores in rankings] == [
        pytest.approx({1: 0.6, 0: 0.0}),
        pytest.approx({1: 1.0, 0: 0.8}),
    ]


def test_all_documents_may_be_fresh() -> None:
    rankings = Dense(StandIn(PAIR)).answer(RETRIEVAL)
    assert best(rankings) == [1, 1]
    assert StandIn(PAIR).uncached().read(["狗"], Side.DOCUMENT, RETRIEVAL)[0].tolist() == pytest.approx([0.8, 0.6])


def test_a_pair_has_two_systems_of_their_own_names_and_an_encoder_none() -> None:
    names = [system.facts.name for system in fresh_systems(Dense(PAIR))]
    assert names == ["query + document, answers fresh", "query + document, all fresh"]
    assert list(fresh_systems(Dense(EncoderReader(TableEncoder().opened(), None)))) == []


def test_reranking_has_no_fresh_documents() -> None:
    with pytest.raises(NotApplicable, match="searched"):
        FreshAnswers(Dense(PAIR), PAIR).answer(RERANK)

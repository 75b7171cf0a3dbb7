from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.encoder.spec import Side
from models.errors import BadEncoder, SpaceMismatch
from models.evaluation.cache import VectorCache
from models.evaluation.encoders import OpenEncoder
from models.evaluation.readers import CutReader, EncoderReader, PairReader
from tests.support.evaluation import PETS, RETRIEVAL, STS, TASKS, VECTORS, TableEncoder, a_spec


def reader_of(encoder: TableEncoder, folder: Path) -> EncoderReader:
    return EncoderReader(encoder.opened(), VectorCache(folder, encoder.spec.dim))


def test_a_text_is_encoded_once(tmp_path: Path) -> None:
    encoder = TableEncoder()
    reader = reader_of(encoder, tmp_path)
    for _ in range(2):
        vectors = reader.read(["猫", "狗", "猫"], Side.DOCUMENT, RETRIEVAL)
        assert vectors.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert sorted(encoder.asked) == ["狗", "猫"]
    assert reader_of(encoder, tmp_path).read(["猫"], Side.QUERY, RETRIEVAL).tolist() == [[1, 0]]
    assert len(encoder.asked) == 2


def test_without_a_cache_every_call_encodes(tmp_path: Path) -> None:
    encoder = TableEncoder()
    reader = reader_of(encoder, tmp_path)
    reader.read(["猫"], Side.QUERY, RETRIEVAL)
    for _ in range(2):
        reader.read(["猫"], Side.QUERY, RETRIEVAL, cached=False)
    assert encoder.asked == ["猫"] * 3


def test_the_encoders_instruction_is_used_unless_the_task_has_one(tmp_path: Path) -> None:
    encoder = TableEncoder(spec=a_spec(query_instruction="query:"))
    reader = reader_of(encoder, tmp_path)
    reader.read(["猫"], Side.QUERY, RETRIEVAL)
    reader.read(["猫"], Side.QUERY, replace(RETRIEVAL, query_instruction="Find it."))
    reader.read(["猫"], Side.QUERY, replace(RETRIEVAL, query_instruction=""))
    reader.read(["狗"], Side.DOCUMENT, RETRIEVAL)
    reader.read(["狗"], Side.DOCUMENT, replace(RETRIEVAL, document_instruction="text:"))
    assert encoder.asked == ["query:猫", "Find it.\nQuery: 猫", "猫", "狗", "text:狗"]


def test_the_encoders_template_joins_the_instruction_of_a_task_and_a_query(tmp_path: Path) -> None:
    template = "Instruct: {instruction}\nQuery: "
    encoder = TableEncoder(spec=a_spec().model_copy(update={"query_template": template}))
    reader_of(encoder, tmp_path).read(["猫"], Side.QUERY, replace(RETRIEVAL, query_instruction="Find {it}."))
    assert encoder.asked == ["Instruct: Find {it}.\nQuery: 猫"]


def test_texts_to_encode_are_counted_once_and_progress_is_reported(tmp_path: Path) -> None:
    done: list[int] = []
    encoder = TableEncoder()
    reader = EncoderReader(encoder.opened(), VectorCache(tmp_path, 2), done.append)
    assert reader.unread(TASKS, tuple(Side)) == set(VECTORS)
    assert reader.unread([RETRIEVAL], [Side.DOCUMENT]) == {"猫", "狗"}
    for task in TASKS:
        for side, texts in task.texts():
            reader.read(texts, side, task)
    assert sum(done) == sum(map(len, VECTORS))
    assert reader.unread(TASKS, tuple(Side)) == set()


def test_a_pair_gives_each_side_to_its_own_encoder(tmp_path: Path) -> None:
    small, large = TableEncoder("small"), TableEncoder("large")
    pair = PairReader(reader_of(small, tmp_path / "a"), reader_of(large, tmp_path / "b"))
    pair.read(PETS.queries, Side.QUERY, RETRIEVAL)
    pair.read(PETS.documents, Side.DOCUMENT, RETRIEVAL)
    # Sentences to be compared are read by the query encoder.
    pair.read(["小狗"], Side.QUERY, STS)
    assert set(small.asked) == {"小猫", "小狗"}
    assert set(large.asked) == {"猫", "狗"}
    assert pair.facts.name == "small + large"


@pytest.mark.parametrize("other", [a_spec(space="elsewhere"), a_spec(dim=3)])
def test_encoders_of_two_spaces_are_refused_as_a_pair(tmp_path: Path, other) -> None:  # noqa: ANN001
    first, second = TableEncoder(), TableEncoder("other", other)
    with pytest.raises(SpaceMismatch, match="trained as a pair"):
        PairReader(reader_of(first, tmp_path / "a"), reader_of(second, tmp_path / "b"))


def test_the_first_dimensions_are_unit_vectors_again(tmp_path: Path) -> None:
    cut = CutReader(reader_of(TableEncoder(), tmp_path), 1)
    assert cut.read(["小猫", "猫"], Side.QUERY, RETRIEVAL).tolist() == [[1], [1]]
    # A vector that lies in the other dimensions becomes zero; it must not become NaN.
    assert cut.read(["狗"], Side.DOCUMENT, RETRIEVAL).tolist() == [[0]]
    assert cut.read(["小猫"], Side.QUERY, RETRIEVAL, cached=False).tolist() == [[1]]
    assert (cut.facts.name, cut.facts.dim) == ("table 1d", 1)


@pytest.mark.parametrize("number", [np.nan, 0])
def test_a_vector_with_nan_or_of_zeros_is_refused_and_not_cached(tmp_path: Path, number: float) -> None:
    def broken(texts: object) -> np.ndarray:
        return np.array([[number, 0]], dtype=np.float32)

    encoder = OpenEncoder("broken", a_spec(), "x", None, broken)
    with pytest.raises(BadEncoder, match="zero or not finite"):
        EncoderReader(encoder, VectorCache(tmp_path, 2)).read(["猫"], Side.QUERY, RETRIEVAL)
    assert list(tmp_path.iterdir()) == []

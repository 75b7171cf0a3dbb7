"""Encoding in shards equals encoding at once, and invalid embeddings are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from indexer.encode import Work, chunked, content_hashes
from indexer.errors import BadBuild
from indexer.store.shards import Shard, Shards
from models.encoder.onnx import OnnxEncoder, Vectors
from models.encoder.spec import Side
from tests.support.fast_encoder import DIM, FastEncoder

TEXTS = ["高血压", "糖尿病患者的饮食建议", "fever", "心电图检查的适应证和注意事项" * 3, "a"]


class Scaled(FastEncoder):
    """An encoder whose vectors do not have unit length."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        return super().encode(texts, side) * np.float32(self._factor)


def found(shards: Sequence[Shard]) -> dict[bytes, np.ndarray]:
    return {h.tobytes(): v for shard in shards for h, v in zip(shard.hashes, shard.vectors, strict=True)}


def test_every_text_is_found_by_its_hash(encoder: OnnxEncoder, tmp_path: Path) -> None:
    place = Shards(tmp_path)
    Work(place, 2).do(iter(TEXTS), len(TEXTS), encoder)
    shards = list(place.read(encoder.spec.dim))
    assert sorted(len(shard.hashes) for shard in shards) == [1, 2, 2]
    stored = found(shards)
    for text, content_hash in zip(TEXTS, content_hashes(TEXTS, encoder), strict=True):
        alone = encoder.encode([text], Side.DOCUMENT)[0]
        assert float(stored[content_hash.tobytes()] @ alone) > 0.99  # int8 scales differ between batches


class Waiting(FastEncoder):
    """Encodes nothing until `reading` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        assert self.reading.wait(60)
        return super().encode(texts, side)


def test_exactly_one_shard_is_read_ahead_during_encoding(tmp_path: Path) -> None:
    encoder, finished = Waiting(), []

    def texts() -> Iterator[str]:
        for number, text in enumerate(TEXTS):
            if number == 2:
                encoder.reading.set()
            finished.append(len(list(tmp_path.glob("*.npy"))))
            yield text

    Work(Shards(tmp_path), 2).do(texts(), len(TEXTS), encoder)
    assert encoder.texts == TEXTS
    assert finished[:2] == [0, 0]
    assert finished[4] >= 1


def test_an_error_while_reading_texts_ends_the_encoding(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS[:3]
        raise OSError(5, "Input/output error")

    place = Shards(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        Work(place, 2).do(texts(), len(TEXTS), FastEncoder())
    assert [len(shard.hashes) for shard in place.read(DIM)] == [2]


def test_the_progress_bar_is_hidden_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Work(Shards(tmp_path), 10).do(["a"], 1, FastEncoder())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("factor", [2.0, 0.0, float("nan"), float("inf")])
def test_vectors_without_unit_length_are_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(BadBuild, match="not 1"), np.errstate(all="ignore"):
        Work(Shards(tmp_path), 10).do(TEXTS, len(TEXTS), Scaled(factor))
    assert list(Shards(tmp_path).read(DIM)) == []


def test_content_hash_depends_on_text_encoder_and_instruction() -> None:
    first, same, other = content_hashes(["a", "a", "b"], FastEncoder())
    assert first.tobytes() == same.tobytes() != other.tobytes()
    assert content_hashes(["a"], FastEncoder("another")).tobytes() != first.tobytes()
    assert content_hashes(["a"], FastEncoder(instruction="为检索表示：")).tobytes() != first.tobytes()


def test_chunked_keeps_every_item() -> None:
    assert list(chunked(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunked([], 2)) == []

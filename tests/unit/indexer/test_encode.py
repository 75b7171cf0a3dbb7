"""Encoding in chunks gives what encoding at once gives, and refuses what is no embedding."""

from __future__ import annotations

import numpy as np
import pytest

from indexer import encode
from indexer.encode import chunked, content_hashes, encode_passages
from indexer.errors import BadBuild
from models.onnx_encoder import OnnxEncoder, Vectors
from models.spec import Side

TEXTS = ["高血压", "糖尿病患者的饮食建议", "fever", "心电图检查的适应证和注意事项" * 3, "a"]


class Scaled:
    """An encoder whose vectors are not of unit length."""

    def __init__(self, encoder: OnnxEncoder, factor: float) -> None:
        self.spec, self.fingerprint, self.tokenize = encoder.spec, encoder.fingerprint, encoder.tokenize
        self._encoder, self._factor = encoder, factor

    def encode_tokens(self, batch: list) -> Vectors:
        return self._encoder.encode_tokens(batch) * np.float32(self._factor)


def test_rows_keep_the_order_of_the_texts(encoder: OnnxEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "CHUNK", 2)
    vectors = np.zeros((len(TEXTS), encoder.spec.dim), dtype=np.float16)
    hashes = encode_passages(iter(TEXTS), encoder, vectors)
    alone = np.concatenate([encoder.encode([text], Side.DOCUMENT) for text in TEXTS])
    assert (np.sum(vectors.astype(np.float32) * alone, axis=1) > 0.99).all()  # int8 scales differ between batches
    np.testing.assert_array_equal(hashes, content_hashes(TEXTS, encoder))


def test_progress_bar_is_quiet_without_a_terminal(encoder: OnnxEncoder, capsys: pytest.CaptureFixture[str]) -> None:
    encode_passages(["a"], encoder, np.zeros((1, encoder.spec.dim), dtype=np.float16))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("factor", [2.0, 0.0, float("nan"), float("inf")])
def test_vectors_that_are_not_of_unit_length_are_refused(encoder: OnnxEncoder, factor: float) -> None:
    vectors = np.zeros((len(TEXTS), encoder.spec.dim), dtype=np.float16)
    with pytest.raises(BadBuild, match="not 1"), np.errstate(all="ignore"):
        encode_passages(TEXTS, Scaled(encoder, factor), vectors)  # type: ignore[arg-type]


def test_content_hash_depends_on_text_and_encoder(encoder: OnnxEncoder) -> None:
    first, same, other = content_hashes(["a", "a", "b"], encoder)
    assert first.tobytes() == same.tobytes() != other.tobytes()
    foreign = Scaled(encoder, 1.0)
    foreign.fingerprint = "another"
    assert content_hashes(["a"], foreign).tobytes() != first.tobytes()  # type: ignore[arg-type]


def test_chunked_keeps_every_item() -> None:
    assert list(chunked(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunked([], 2)) == []

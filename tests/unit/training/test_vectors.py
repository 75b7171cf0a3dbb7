"""Vectors on disk: of the right texts by the right encoder, and encoded once even after a kill."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.encoder.spec import Side
from models.encoder.torch import Projection, TorchEncoder
from models.training.passes import TokenTable, take
from models.training.ranks import Ranks
from models.training.tables import Texts
from models.training.vectors import Reader, file_of, kept_in
from tests.support.toy_training import DOCUMENTS, toy_encoder

CPU = torch.device("cpu")
TEXTS = Texts(Side.DOCUMENT, DOCUMENTS)


class Killed(Exception):
    pass


def a_reader(tokens: int = 60) -> tuple[Reader, TokenTable]:
    encoder = toy_encoder("bert").eval()
    table = TokenTable.build(TEXTS, encoder.spec, encoder.tokenizer, Ranks(0, 1, CPU))
    return Reader(encoder, Ranks(0, 1, CPU), tokens=tokens, precision="fp32"), table


def test_cached_vectors_equal_those_of_the_encoder(tmp_path: Path) -> None:
    reader, table = a_reader()
    kept = reader.keep(TEXTS, tmp_path / "deep" / "v.f16")
    expected = toy_encoder("bert").eval().encode(DOCUMENTS, Side.DOCUMENT)
    np.testing.assert_allclose(kept, expected, atol=1e-3)
    np.testing.assert_allclose(reader.all(table), expected, atol=1e-5)
    np.testing.assert_array_equal(take(kept, np.array([3, 1]), CPU).numpy(), kept[[3, 1]].astype(np.float32))
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["v.f16", "v.keys"]


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
@pytest.mark.parametrize("projected", [False, True])
def test_a_frozen_encoder_gives_the_same_vectors_packed_and_padded(architecture: str, projected: bool) -> None:
    encoder = toy_encoder(architecture).eval()
    if projected:
        width = encoder.spec.native_dim
        encoder = TorchEncoder(encoder.backbone, encoder.spec, encoder.tokenizer_json, Projection(width, width)).eval()
    encoder = encoder.to(torch.bfloat16)
    table = TokenTable.build(TEXTS, encoder.spec, encoder.tokenizer, Ranks(0, 1, CPU))
    reader = Reader(encoder, Ranks(0, 1, CPU), tokens=60, precision="bf16")
    padded = reader.all(table)
    reader.pack(table)
    assert reader._packed is not None
    np.testing.assert_allclose(reader.all(table), padded, atol=0.03)
    assert (reader.all(table) * padded).sum(axis=1).min() > 0.999


def test_encoders_that_cannot_be_packed_are_run_padded() -> None:
    reader, table = a_reader()
    reader.pack(table)
    assert reader._packed is None


def test_a_killed_encoding_resumes_with_the_missing_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, table = a_reader()
    chunks = len(table.chunks(np.arange(len(table)), 60))
    assert chunks > 3
    plain, read = Reader.vectors, []

    def dies(self: Reader, table: TokenTable, rows: np.ndarray) -> torch.Tensor:
        if len(read) == 2:
            raise Killed
        read.append(rows)
        return plain(self, table, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "vectors", dies)
        with pytest.raises(Killed):
            reader.keep(TEXTS, tmp_path / "v.f16")
    assert not (tmp_path / "v.f16").exists()
    again: list[np.ndarray] = []
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "vectors", lambda self, table, rows: again.append(rows) or plain(self, table, rows))
        found = reader.keep(TEXTS, tmp_path / "v.f16")
    assert len(again) == chunks - 2
    np.testing.assert_array_equal(found, a_reader()[0].keep(TEXTS, tmp_path / "w.f16"))
    np.testing.assert_array_equal(kept_in(tmp_path / "v.f16", *found.shape), found)


def test_texts_that_another_file_holds_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = a_reader()
    some, other = Texts(Side.DOCUMENT, DOCUMENTS[2:6]), Texts(Side.QUERY, DOCUMENTS)
    first = reader.keep(some, file_of(tmp_path, "e", some))
    plain, read = Reader.vectors, list[int]()
    monkeypatch.setattr(Reader, "vectors", lambda self, table, rows: read.extend(rows) or plain(self, table, rows))
    found = reader.keep(TEXTS, file_of(tmp_path, "e", TEXTS))
    assert len(read) == len(DOCUMENTS) - 4
    np.testing.assert_array_equal(found[2:6], first)
    np.testing.assert_allclose(found, toy_encoder("bert").eval().encode(DOCUMENTS, Side.DOCUMENT), atol=1e-3)
    for function, texts in (("f", TEXTS), ("e", other)):  # of another encoder, or of the other side
        read.clear()
        reader.keep(texts, file_of(tmp_path, function, texts))
        assert len(read) == len(DOCUMENTS)
    read.clear()
    again = Texts(Side.DOCUMENT, DOCUMENTS[::-1])
    np.testing.assert_array_equal(reader.keep(again, file_of(tmp_path, "e", again)), found[::-1])
    assert not read


@pytest.mark.parametrize("lost", ["v.part", "v.f16"])
def test_marks_without_their_values_do_not_count(tmp_path: Path, lost: str) -> None:
    reader, _ = a_reader()
    found = np.array(reader.keep(TEXTS, tmp_path / "v.f16"))
    (tmp_path / "v.part").write_bytes(bytes(2 * found.size))
    (tmp_path / "v.done").write_bytes(b"\1" * len(DOCUMENTS))
    (tmp_path / lost).unlink()
    if lost == "v.f16":
        (tmp_path / "v.part").write_bytes(b"")
    np.testing.assert_array_equal(reader.keep(TEXTS, tmp_path / "v.f16"), found)


def test_a_file_without_its_vectors_is_passed_over(tmp_path: Path) -> None:
    reader, _ = a_reader()
    some = Texts(Side.DOCUMENT, DOCUMENTS[:3])
    path = file_of(tmp_path, "e", some)
    reader.keep(some, path)
    path.unlink()
    assert len(reader.keep(TEXTS, file_of(tmp_path, "e", TEXTS))) == len(DOCUMENTS)


def test_files_are_named_by_encoder_side_instruction_and_texts(tmp_path: Path) -> None:
    variants = [
        file_of(tmp_path, "e", TEXTS),
        file_of(tmp_path, "f", TEXTS),
        file_of(tmp_path, "e", Texts(Side.QUERY, DOCUMENTS)),
        file_of(tmp_path, "e", Texts(Side.DOCUMENT, [*DOCUMENTS, "更多"])),
        file_of(tmp_path, "e", Texts(Side.DOCUMENT, ["ab", "c"])),
        file_of(tmp_path, "e", Texts(Side.DOCUMENT, ["a", "bc"])),
        file_of(tmp_path, "e", Texts(Side.QUERY, DOCUMENTS, ["找："] * len(DOCUMENTS))),
    ]
    assert len(set(variants)) == len(variants)
    assert file_of(tmp_path, "e", Texts(Side.DOCUMENT, list(DOCUMENTS))) == variants[0]

"""Vectors on disk: of the right texts by the right encoder, and encoded once even after a kill."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.encoder.spec import Side
from models.encoder.torch import Projection, TorchEncoder
from models.training.kept import Kept, Shelf
from models.training.passes import TokenTable, take
from models.training.texts import Texts
from models.training.vectors import Reader
from tests.support.toy_training import DOCUMENTS, ONE, toy_encoder

CPU = torch.device("cpu")
TEXTS = Texts(Side.DOCUMENT, DOCUMENTS)


class Killed(Exception):
    pass


def a_reader() -> tuple[Reader, TokenTable]:
    encoder = toy_encoder("bert").eval()
    table = TokenTable.build(TEXTS, encoder.spec, encoder.tokenizer, ONE)
    return Reader(encoder, ONE, tokens=60, precision="fp32"), table


def kept_by(reader: Reader, texts: Texts, folder: Path, function: str = "e") -> Kept:
    """Reads what no file holds, as a run does."""
    shelf = Shelf(folder, function, texts.side, reader.encoder.spec.dim)
    if len(missing := shelf.find(texts).missing):
        reader.keep(texts.take(missing), shelf.file_for(texts.take(missing)))
    return shelf.find(texts)


def test_cached_vectors_equal_those_of_the_encoder(tmp_path: Path) -> None:
    reader, table = a_reader()
    kept = kept_by(reader, TEXTS, tmp_path / "deep")
    expected = toy_encoder("bert").eval().encode(DOCUMENTS, Side.DOCUMENT)
    np.testing.assert_allclose(kept, expected, atol=1e-3)
    np.testing.assert_allclose(reader.all(table), expected, atol=1e-5)
    rows = np.array([3, 1])
    np.testing.assert_array_equal(take(kept, rows, CPU).numpy(), np.asarray(kept)[rows].astype(np.float32))
    assert sorted(path.suffix for path in (tmp_path / "deep").iterdir()) == [".f16", ".keys"]


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
@pytest.mark.parametrize("projected", [False, True])
def test_a_frozen_encoder_gives_the_same_vectors_packed_and_padded(architecture: str, projected: bool) -> None:
    encoder = toy_encoder(architecture).eval()
    if projected:
        width = encoder.spec.native_dim
        encoder = TorchEncoder(encoder.backbone, encoder.spec, encoder.tokenizer_json, Projection(width, width)).eval()
    encoder = encoder.to(torch.bfloat16)
    table = TokenTable.build(TEXTS, encoder.spec, encoder.tokenizer, ONE)
    reader = Reader(encoder, ONE, tokens=60, precision="bf16")
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
            kept_by(reader, TEXTS, tmp_path)
    assert not list(tmp_path.glob("*.f16"))
    again: list[np.ndarray] = []
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "vectors", lambda self, table, rows: again.append(rows) or plain(self, table, rows))
        found = kept_by(reader, TEXTS, tmp_path)
    assert len(again) == chunks - 2
    np.testing.assert_array_equal(found, kept_by(a_reader()[0], TEXTS, tmp_path / "other"))


def test_texts_that_another_file_holds_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = a_reader()
    some, other = Texts(Side.DOCUMENT, DOCUMENTS[2:6]), Texts(Side.QUERY, DOCUMENTS)
    first = np.asarray(kept_by(reader, some, tmp_path))
    plain, read = Reader.vectors, list[int]()
    monkeypatch.setattr(Reader, "vectors", lambda self, table, rows: read.extend(rows) or plain(self, table, rows))
    found = np.asarray(kept_by(reader, TEXTS, tmp_path))
    assert len(read) == len(DOCUMENTS) - 4
    assert sorted(path.stat().st_size for path in tmp_path.glob("*.f16")) == [4 * 128, 8 * 128], (
        "no vector is there twice"
    )
    np.testing.assert_array_equal(found[2:6], first)
    np.testing.assert_allclose(found, toy_encoder("bert").eval().encode(DOCUMENTS, Side.DOCUMENT), atol=1e-3)
    for function, texts in (("f", TEXTS), ("e", other)):  # of another encoder, or of the other side
        read.clear()
        kept_by(reader, texts, tmp_path, function)
        assert len(read) == len(DOCUMENTS)
    read.clear()
    again = kept_by(reader, Texts(Side.DOCUMENT, DOCUMENTS[::-1]), tmp_path)
    np.testing.assert_array_equal(again, found[::-1])
    np.testing.assert_array_equal(again[np.array([7, 0, 3])], found[::-1][[7, 0, 3]])
    assert not read


def test_two_stand_side_by_side_with_their_shares(tmp_path: Path) -> None:
    reader, _ = a_reader()
    one = kept_by(reader, TEXTS, tmp_path)
    two = one.beside(one, 0.36)
    assert two.shape == (len(DOCUMENTS), 2 * one.shape[1])
    np.testing.assert_allclose(two, np.hstack([0.8 * np.asarray(one), 0.6 * np.asarray(one)]), atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(two, dtype=np.float32), axis=1), 1, atol=1e-2)


@pytest.mark.parametrize("lost", [".part", ".f16"])
def test_marks_without_their_values_do_not_count(tmp_path: Path, lost: str) -> None:
    reader, _ = a_reader()
    found = np.asarray(kept_by(reader, TEXTS, tmp_path))
    (path,) = tmp_path.glob("*.f16")
    path.with_suffix(".part").write_bytes(bytes(2 * found.size) if lost == ".f16" else b"")
    path.with_suffix(".done").write_bytes(b"\1" * len(DOCUMENTS))
    path.unlink()
    if lost == ".f16":
        path.with_suffix(".part").unlink()
    np.testing.assert_array_equal(kept_by(reader, TEXTS, tmp_path), found)


def test_a_file_without_its_vectors_is_passed_over(tmp_path: Path) -> None:
    reader, _ = a_reader()
    kept_by(reader, Texts(Side.DOCUMENT, DOCUMENTS[:3]), tmp_path)
    next(tmp_path.glob("*.f16")).unlink()
    assert len(kept_by(reader, TEXTS, tmp_path).missing) == 0


def test_files_are_named_by_encoder_side_instruction_and_texts(tmp_path: Path) -> None:
    def name(function: str, texts: Texts) -> Path:
        return Shelf(tmp_path, function, texts.side, 32).file_for(texts)

    variants = [
        name("e", TEXTS),
        name("f", TEXTS),
        name("e", Texts(Side.QUERY, DOCUMENTS)),
        name("e", Texts(Side.DOCUMENT, [*DOCUMENTS, "更多"])),
        name("e", Texts(Side.DOCUMENT, ["ab", "c"])),
        name("e", Texts(Side.DOCUMENT, ["a", "bc"])),
        name("e", Texts(Side.QUERY, DOCUMENTS, ["找："] * len(DOCUMENTS))),
    ]
    assert len(set(variants)) == len(variants)
    assert name("e", Texts(Side.DOCUMENT, list(DOCUMENTS))) == variants[0]

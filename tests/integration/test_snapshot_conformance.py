"""The check that a snapshot answers here as where it was built: it passes only if nothing differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from indexer.errors import BadSnapshot
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from tests.support.fast_encoder import FastEncoder
from tests.support.snapshot_conformance import (
    KINDS,
    LEAST_COSINE,
    Record,
    compare,
    differences,
    encode_again,
    write,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write(folder, FastEncoder())
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Copies the folder, as it would arrive on another machine."""
    return Path(shutil.copytree(written, tmp_path / "arrived"))


def change(folder: Path, record: Record) -> None:
    (folder / "expected.json").write_text(record.model_dump_json(), encoding="utf-8")


def read(folder: Path) -> Record:
    return Record.model_validate_json((folder / "expected.json").read_bytes())


def test_a_snapshot_of_every_kind_answers_as_it_did(folder: Path) -> None:
    compared = list(compare(folder))
    assert {one.kind for one in compared} == set(KINDS)
    assert {(one.what, one.count) for one in compared} == {
        ("documents", 400),
        ("vectors", 100),
        ("filtered", 100),
        ("words", 100),
    }
    assert [one for one in compared if one.same < one.count or one.apart] == []
    assert differences(folder, FastEncoder()) == []


@pytest.mark.parametrize("way", ["vectors", "filtered", "words"])
def test_a_different_top_10_is_reported(folder: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = read(folder)
    rows = next(iter(record.versions.values())).rankings[way][0].rows
    rows[0], rows[1] = rows[1], rows[0]
    change(folder, record)
    assert [(one.what, one.count - one.same) for one in compare(folder) if one.same < one.count] == [(way, 1)]
    (difference,) = differences(folder, FastEncoder())
    assert f"{way:9} 99 of 100 the same" in difference
    assert difference in capsys.readouterr().out


def test_a_different_document_is_reported(folder: Path) -> None:
    record = read(folder)
    next(iter(record.versions.values())).documents[7] = ""
    change(folder, record)
    assert [(one.what, one.count - one.same) for one in compare(folder) if one.same < one.count] == [("documents", 1)]


def test_a_different_encoder_is_reported(folder: Path) -> None:
    assert encode_again(folder, FastEncoder()).least >= LEAST_COSINE
    encoded = encode_again(folder, FastEncoder("another"))
    assert encoded.least < LEAST_COSINE
    assert encoded.passages[0] < len(encoded.cosines)


def test_a_snapshot_that_was_damaged_on_the_way_is_refused(folder: Path) -> None:
    collection = Collection(folder / "collection")
    vectors = collection.folder(collection.versions()[0]) / "vectors.npy"
    vectors.write_bytes(vectors.read_bytes()[:-1] + b"?")
    with pytest.raises(BadSnapshot, match=r"vectors\.npy was altered"):
        differences(folder, FastEncoder())


def test_a_folder_of_another_machine_answers_as_it_did_there(
    pytestconfig: pytest.Config, folder: Path, encoder: OnnxEncoder
) -> None:
    """Checks the folder of `--snapshots FOLDER`, with the bundled encoder unless `--fast`; fills it if it is empty."""
    own = FastEncoder()
    if (given := pytestconfig.getoption("--snapshots")) is not None:
        folder, own = Path(given), own if pytestconfig.getoption("--fast") else encoder
        if not (folder / "expected.json").exists():
            write(folder, own)
    assert differences(folder, own) == []

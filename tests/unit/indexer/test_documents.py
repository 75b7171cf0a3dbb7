"""Documents are read as written, by row and by id, and as the JSON of an answer."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BadSnapshot
from indexer.store import documents as documents_module
from indexer.store.documents import Documents, DocumentsWriter
from indexer.store.snapshot import Snapshot
from tests.unit.indexer.support import ENTRIES

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


def write(folder: Path, rows: list[tuple[str, str, str]]) -> Documents:
    writer = DocumentsWriter(folder, ExitStack())
    for document_id, title, text in rows:
        writer.add(document_id, title, text, {"n": 1})
    return Documents.open(folder, writer.close())


@given(rows=st.lists(st.tuples(UNICODE, UNICODE, UNICODE), min_size=1, max_size=20, unique_by=lambda row: row[0]))
def test_documents_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    documents = write(tmp_path_factory.mktemp("documents"), rows)
    assert len(documents) == len(rows)
    for row, (document_id, title, text) in enumerate(rows):
        document = documents.get(row)
        assert (document.id, document.title, document.text) == (document_id, title, text)
        assert json.loads(documents.get(row).text_json) == text
        assert documents.row_of(document_id) == row


def test_the_json_of_a_document_has_no_outer_braces(snapshot: Snapshot) -> None:
    document = snapshot.documents.get(0)
    assert json.loads(b"{" + document.json + b"}") == {
        "id": "drug-1",
        "title": "阿司匹林",
        "metadata": {"kind": "drug", "year": 2020, "tags": ["血液", "心脏"]},
    }
    assert document.metadata == ENTRIES[0].metadata


@pytest.mark.parametrize("unknown", ["", "drug-3", "drug", "\ud800"])
def test_unknown_id_has_no_row(snapshot: Snapshot, unknown: str) -> None:
    assert snapshot.documents.row_of(unknown) is None


def test_ids_with_equal_hashes_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_hash", lambda document_id: 7)
    documents = write(tmp_path, [("a", "", "1"), ("b", "", "2"), ("c", "", "3")])
    assert [documents.row_of(document_id) for document_id in "abcd"] == [0, 1, 2, None]


def test_row_out_of_bounds_is_an_error(snapshot: Snapshot) -> None:
    for row in (-1, len(snapshot.documents)):
        with pytest.raises(IndexError):
            snapshot.documents.get(row)


def test_a_blob_that_disagrees_with_its_offsets_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [("a", "", "text")])
    with (tmp_path / "documents.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(BadSnapshot, match="length that its offsets say"):
        Documents.open(tmp_path, 1)

"""Builds with documents posted to the service: none is lost, in any order of events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.build import BuildOptions, BuildSummary, build
from indexer.errors import BadCorpus
from indexer.store.collection import Collection
from indexer.store.filters import Equal
from indexer.store.fresh_log import Cursor, Deleted, Posted
from indexer.store.snapshot import Snapshot
from tests.support.fast_encoder import FastEncoder
from tests.unit.indexer.support import write_lines

OPTIONS = BuildOptions(passage_tokens=64, overlap=8)


def row(name: str, text: str = "", **metadata: object) -> dict[str, Any]:
    return {"_id": name, "title": f"标题{name}", "text": text or f"正文 {name}", "metadata": metadata}


class Place:
    """A collection, with the actions of an operator and a service."""

    def __init__(self, folder: Path) -> None:
        self.collection = Collection(folder / "collection")
        self.corpus = folder / "corpus.jsonl"
        self.log = self.collection.fresh_log

    def build(self, *names: str, publish: bool = True, options: BuildOptions = OPTIONS, **texts: str) -> BuildSummary:
        rows = [row(name, texts.get(name, "")) for name in names]
        summary = build([write_lines(self.corpus, *rows)], FastEncoder(), self.collection, options)
        if publish:
            self.collection.publish(summary.version)
        return summary

    def post(self, name: str, text: str = "posted", **metadata: Any) -> int:  # noqa: ANN401 (any value)
        self.collection.root.mkdir(exist_ok=True)
        vectors = np.zeros((1, 4), np.float16)
        return self.log.append([Posted(name, "", text, metadata, [(0, len(text))], "fp", vectors)])

    def delete(self, name: str) -> int:
        return self.log.append([Deleted(name)])

    def texts(self, summary: BuildSummary) -> dict[str, str]:
        documents = Snapshot.open(summary.folder).documents
        return {documents.get(number).id: documents.get(number).text for number in range(len(documents))}

    def logged(self) -> list[int]:
        """Returns the positions that the log still has."""
        first = min((int(path.stem) for path in self.log.folder.glob("*.log")), default=1)
        return [frame.position for frame in self.log.read(Cursor(first - 1))[0]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_build_takes_in_what_was_posted_and_leaves_out_what_was_deleted(place: Place) -> None:
    place.build("a", "b", "c")
    place.post("x", "new")
    place.post("b", "replaced")
    place.delete("c")
    summary = place.build("a", "b", "c")
    assert place.texts(summary) == {"a": "正文 a", "b": "replaced", "x": "new"}
    manifest = Snapshot.open(summary.folder).manifest
    assert (manifest.fresh.position, manifest.fresh.posted, summary.posted) == (3, 1, 1)


def test_a_posted_document_is_kept_until_a_corpus_has_it(place: Place) -> None:
    place.build("a")
    place.post("x", "posted")
    for _ in range(3):
        assert place.texts(place.build("a"))["x"] == "posted"
    assert place.texts(place.build("a", "x"))["x"] == "正文 x"
    assert "x" not in place.texts(place.build("a"))


def test_a_deleted_document_stays_deleted_until_the_corpus_drops_it(place: Place) -> None:
    place.build("a", "b")
    place.delete("b")
    for _ in range(3):
        assert list(place.texts(place.build("a", "b"))) == ["a"]
    place.build("a")
    assert list(place.texts(place.build("a", "b"))) == ["a", "b"]


@pytest.mark.parametrize("bad", [b'{"_id": "b", "text": 7}', b'{"_id": "b", "text": "cut sh', b'{"text": "no id"}'])
def test_a_deleted_document_stays_deleted_while_its_row_is_set_aside(place: Place, bad: bytes) -> None:
    place.build("a", "b")
    place.delete("b")
    place.build("a", "b")
    path = write_lines(place.corpus, row("a"), bad)
    summary = build([path], FastEncoder(), place.collection, replace(OPTIONS, skip_bad=True))
    place.collection.publish(summary.version)
    assert list(place.texts(place.build("a", "b"))) == ["a"]


def test_a_posted_document_stays_while_the_corpus_has_a_bad_row_of_it(place: Place) -> None:
    place.build("a")
    place.post("x", "posted")
    for _ in range(2):
        path = write_lines(place.corpus, row("a"), b'{"_id": "x", "text": 7}')
        summary = build([path], FastEncoder(), place.collection, replace(OPTIONS, skip_bad=True))
        place.collection.publish(summary.version)
        assert place.texts(summary)["x"] == "posted"


def test_a_posted_document_can_be_deleted_after_it_was_indexed(place: Place) -> None:
    place.build("a")
    place.post("x")
    place.build("a")
    place.delete("x")
    assert list(place.texts(place.build("a"))) == ["a"]
    place.post("x", "again")
    assert place.texts(place.build("a"))["x"] == "again"


def test_a_withdrawn_document_may_be_posted_again(place: Place) -> None:
    place.build("a", "b")
    place.delete("b")
    place.build("a", "b")
    place.post("b", "mended")
    assert place.texts(place.build("a", "b"))["b"] == "mended"
    assert place.texts(place.build("a", "b"))["b"] == "正文 b"


def test_a_posted_text_overrides_the_corpus_for_one_build(place: Place) -> None:
    place.build("a")
    place.post("a", "posted")
    assert place.texts(place.build("a"))["a"] == "posted"
    assert place.texts(place.build("a"))["a"] == "正文 a"


def test_documents_posted_during_a_build_are_in_the_next(place: Place) -> None:
    place.build("a")
    place.post("x")
    summary = place.build("a")
    place.post("y")
    position = Snapshot.open(summary.folder).manifest.fresh.position
    assert [frame.position for frame in place.log.read(Cursor(position))[0]] == [2]
    assert set(place.texts(place.build("a"))) == {"a", "x", "y"}


def test_the_log_is_kept_as_far_as_the_oldest_kept_version_needs(place: Place) -> None:
    first = place.build("a")
    place.post("x")
    second = place.build("a")
    place.post("y")
    third = place.build("a")
    assert place.logged() == [1, 2]  # a rollback to the first version needs both
    place.collection.prune(keep=2, keep_days=0)
    assert place.collection.versions() == [second.version, third.version]
    assert place.logged() == [2]
    place.collection.prune(keep=1, keep_days=0)
    assert first.version not in place.collection.versions()
    assert place.logged() == [2]  # the second version is the rollback target
    assert place.post("z") == 3


def test_a_build_after_a_rollback_has_all_documents(place: Place) -> None:
    place.build("a")
    place.post("x")
    second = place.build("a", "b")
    place.post("y")
    place.delete("x")
    place.build("a", "b", "x")
    place.collection.rollback(second.version)
    assert set(place.texts(place.build("a"))) == {"a", "y"}


def test_a_build_that_was_never_published_loses_nothing(place: Place) -> None:
    place.build("a", publish=False)
    place.post("x")
    place.build("a", publish=False)
    assert set(place.texts(place.build("a", publish=False))) == {"a", "x"}


def test_a_damaged_version_is_skipped(place: Place) -> None:
    first = place.build("a")
    place.post("x")
    second = place.build("a")
    (second.folder / "documents.bin").write_bytes(b"")
    place.collection.rollback(first.version)
    (first.folder / "manifest.json").write_text("{}")
    with pytest.raises(BadCorpus, match="neither"):
        build([write_lines(place.corpus, {"_id": "q"})], FastEncoder(), place.collection, OPTIONS)
    assert set(place.texts(place.build("a"))) == {"a", "x"}


@pytest.mark.parametrize("content", [None, b"[]", b"{"])
def test_a_withdrawn_document_does_not_come_back_with_a_damaged_version(place: Place, content: bytes | None) -> None:
    place.build("a", "b")
    place.delete("b")
    second = place.build("a", "b")
    assert set(place.texts(second)) == {"a"}
    path = second.folder / "withdrawn.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert set(place.texts(place.build("a", "b"))) == {"a"}


def test_an_acknowledged_document_never_stops_a_build(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Values that do not suit their field are shown, and no filter matches them."""
    place.build("a")
    place.post("x", year="last", tags=[])
    place.post("y", tags=7, dose="much")
    place.post("z", dose=0.5)
    for _ in range(2):  # read from the log, then from the version before
        caplog.clear()
        summary = build([write_lines(place.corpus, row("a", year=2024))], FastEncoder(), place.collection, OPTIONS)
        place.collection.publish(summary.version)
        snapshot = Snapshot.open(summary.folder)
        assert list(place.texts(summary)) == ["a", "x", "y", "z"]
        assert [snapshot.documents.get(number).metadata for number in (1, 2, 3)] == [
            {"year": "last", "tags": []},
            {"tags": 7, "dose": "much"},
            {"dose": 0.5},
        ]
        assert snapshot.metadata.select([Equal("year", 2024)]).tolist() == [True, False, False, False]
        assert snapshot.metadata.select([Equal("tags", 7)]).tolist() == [False, False, True, False]
        assert "posted to the service (x): metadata field year is text here and a number at" in caplog.text
        assert summary.rejects_file is None


def test_a_corpus_whose_documents_were_all_deleted_is_refused(place: Place) -> None:
    place.build("a")
    place.delete("a")
    with pytest.raises(BadCorpus, match="all 1 documents were deleted by the service"):
        place.build("a")

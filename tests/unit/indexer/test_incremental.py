"""A re-index encodes only new texts and reports what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.bench import write_corpus
from indexer.build import BuildOptions, BuildSummary, build
from indexer.checks import Changes
from indexer.report import summary_line
from indexer.store.collection import Collection
from indexer.store.snapshot import Snapshot
from tests.support.fast_encoder import FastEncoder
from tests.unit.indexer.support import write_lines

LONG = "阑尾炎的典型表现是转移性右下腹痛。" * 12
OPTIONS = BuildOptions(passage_tokens=64, overlap=8, shard_texts=3)


def row(name: str, text: str | None = None, **metadata: object) -> dict[str, Any]:
    return {"_id": name, "title": f"标题{name}", "text": text or f"正文 {name}", "metadata": metadata}


ROWS = [row(name) for name in "abcdefg"]


class Corpus:
    """A collection, and a file of rows that changes between builds."""

    def __init__(self, folder: Path) -> None:
        self.collection = Collection(folder / "collection")
        self._file = folder / "corpus.jsonl"

    def build(self, rows: list[dict[str, Any]], encoder: FastEncoder | None = None) -> tuple[BuildSummary, list[str]]:
        """Builds; returns the summary, and the texts that the encoder read."""
        encoder = encoder or FastEncoder()
        summary = build([write_lines(self._file, *rows)], encoder, self.collection, OPTIONS)
        self.collection.publish(summary.version)
        return summary, encoder.texts

    def vectors(self, summary: BuildSummary) -> np.ndarray:
        return Snapshot.open(summary.folder).vectors.values


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def test_the_first_build_reads_everything_once(corpus: Corpus) -> None:
    summary, texts = corpus.build(ROWS)
    assert texts == [f"标题{name}\n正文 {name}" for name in "abcdefg"]
    assert (summary.encoded, summary.reused, summary.changes) == (7, 0, Changes(7, 0, 0))


def test_an_unchanged_corpus_needs_no_encoding(corpus: Corpus) -> None:
    first, _ = corpus.build(ROWS)
    second, texts = corpus.build(ROWS)
    assert texts == []
    assert (second.encoded, second.reused, second.changes) == (0, 7, Changes(0, 0, 0))
    np.testing.assert_array_equal(corpus.vectors(first), corpus.vectors(second))
    assert Snapshot.open(first.folder).manifest.content == Snapshot.open(second.folder).manifest.content


def test_added_changed_and_removed_documents_are_counted(
    corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus.build(ROWS)
    later = [row("new"), *reversed(ROWS[2:]), row("b", "另一正文")]  # a is removed, b and the order are changed
    summary, texts = corpus.build(later)
    assert texts == ["标题new\n正文 new", "标题b\n另一正文"]
    assert (summary.encoded, summary.reused, summary.changes) == (2, 5, Changes(1, 1, 1))
    fresh, _ = Corpus(tmp_path_factory.mktemp("fresh")).build(later)
    np.testing.assert_array_equal(corpus.vectors(summary), corpus.vectors(fresh))


def test_changed_metadata_and_ids_need_no_encoding(corpus: Corpus) -> None:
    corpus.build(ROWS)
    summary, texts = corpus.build([row("a", year=2026), *ROWS[1:]])
    assert (texts, summary.changes) == ([], Changes(0, 1, 0))
    summary, texts = corpus.build([ROWS[0] | {"_id": "renamed"}, *ROWS[1:]])
    assert (texts, summary.changes) == ([], Changes(1, 0, 1))


def test_identical_texts_are_encoded_once_and_not_counted_as_reused(corpus: Corpus) -> None:
    rows = [{"_id": str(number), "text": ["同一段文字", "另一段文字"][number % 2]} for number in range(10)]
    summary, texts = corpus.build(rows)
    assert texts == ["同一段文字", "另一段文字"]
    assert (summary.encoded, summary.reused) == (2, 0)
    assert "10 passages (2 encoded, 0 reused, 8 repeated)" in summary_line(
        summary, published=False, removed=0, seconds=1
    )
    vectors = corpus.vectors(summary)
    assert (vectors[0] == vectors[8]).all()
    assert (vectors[0] != vectors[1]).any()


def test_a_changed_end_reuses_the_first_passages(corpus: Corpus) -> None:
    first, _ = corpus.build([row("a", LONG)])
    _, texts = corpus.build([row("a", f"{LONG}新的结尾。")])
    assert 0 < len(texts) < first.counts.passages


def test_a_new_encoder_encodes_everything_again(corpus: Corpus) -> None:
    corpus.build(ROWS)
    summary, texts = corpus.build(ROWS, FastEncoder("another"))
    assert len(texts) == summary.encoded == 7
    summary, texts = corpus.build(ROWS)  # the version of the first encoder still exists
    assert texts == []


def test_encoders_that_differ_in_their_instruction_share_nothing(corpus: Corpus) -> None:
    """The same weights, and here the same fingerprint."""
    plain, _ = corpus.build(ROWS)
    instructed, texts = corpus.build(ROWS, FastEncoder(instruction="为检索表示："))
    assert len(texts) == 7
    assert (corpus.vectors(plain) != corpus.vectors(instructed)).any(axis=1).all()


def test_a_change_of_two_per_cent_encodes_two_per_cent(tmp_path: Path) -> None:
    """The corpus of `make bench-index`, which measures the same at scale."""
    collection, encoder = Collection(tmp_path / "collection"), FastEncoder()
    write_corpus(tmp_path / "c.jsonl.gz", 500, changed=0)
    assert build([tmp_path / "c.jsonl.gz"], encoder, collection).encoded == 500
    write_corpus(tmp_path / "c.jsonl.gz", 500, changed=0.02)
    assert build([tmp_path / "c.jsonl.gz"], encoder, collection).encoded == 10
    assert encoder.count == 510


def test_vectors_are_gone_with_the_last_version_that_has_them(corpus: Corpus) -> None:
    corpus.build(ROWS)
    corpus.build(ROWS[1:])
    _, texts = corpus.build(ROWS)  # a came back while a version still has it
    assert texts == []
    corpus.build(ROWS[1:])
    corpus.build(ROWS[1:])
    corpus.collection.prune(keep=1, keep_days=0)
    _, texts = corpus.build(ROWS)
    assert texts == ["标题a\n正文 a"]


def test_a_damaged_version_gives_no_vectors(corpus: Corpus) -> None:
    summary, _ = corpus.build(ROWS)
    path = summary.folder / "vectors.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    _, texts = corpus.build(ROWS)
    assert len(texts) == 7


def test_a_served_version_that_cannot_be_read_does_not_stop_a_build(corpus: Corpus) -> None:
    summary, _ = corpus.build(ROWS)
    (summary.folder / "ids.rows.npy").unlink()
    later, texts = corpus.build(ROWS[1:])
    assert (texts, later.changes) == ([], Changes(6, 0, 0))
    assert corpus.collection.current() == later.version


@pytest.mark.parametrize("name", ["ids.rows.npy", "ids.hashes.npy", "documents.digests.npy"])
def test_a_served_version_that_was_altered_does_not_stop_a_build(corpus: Corpus, name: str) -> None:
    first, _ = corpus.build(ROWS)
    path = first.folder / name
    content = path.read_bytes()
    path.write_bytes(content[:128] + b"\xff" * (len(content) - 128))
    summary, texts = corpus.build(ROWS)
    assert (texts, summary.changes) == ([], Changes(7, 0, 0))


def test_shards_of_a_finished_build_are_removed(corpus: Corpus) -> None:
    corpus.build(ROWS)
    encoder = FastEncoder()
    assert not corpus.collection.shards(encoder.fingerprint).exists()

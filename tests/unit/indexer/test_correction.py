"""The correction for fresh documents: a build fits it only if another encoder reads queries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build
from indexer.errors import BadBuild, BadSnapshot
from indexer.reindex import Encoders
from indexer.store.collection import Collection
from indexer.store.manifest import MANIFEST_FILE, Manifest, list_files
from indexer.store.snapshot import Snapshot
from models.correction import SAMPLE, Correction, names_of
from models.encoder.onnx import Vectors
from models.encoder.spec import EncoderSpec, Side
from tests.support.fast_encoder import BUNDLED, DIM, FastEncoder
from tests.unit.indexer.support import write_lines

ROWS = 40


class Partner(FastEncoder):
    """A query encoder; its vectors are those of FastEncoder, shifted in one direction."""

    def __init__(self) -> None:
        super().__init__("partner")
        self.spec = self.spec.model_copy(update={"sides": (Side.QUERY,), "query_instruction": "问："})
        self.sides: list[Side] = []

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        self.sides.append(side)
        self.texts.extend(texts)
        vectors = FastEncoder().encode(texts, Side.DOCUMENT) + np.full(DIM, 0.5, np.float32)
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"_id": f"{row}", "title": f"标题{row}", "text": f"第{row}次复查。" * (row % 5)} for row in range(ROWS)]
    return write_lines(tmp_path / "corpus.jsonl", *rows)


def built(corpus: Path, query_encoder: FastEncoder | None) -> Snapshot:
    options = BuildOptions(passage_tokens=64, overlap=8, query_encoder=query_encoder)
    return Snapshot.open(build([corpus], FastEncoder(), Collection(corpus.parent / "collection"), options).folder)


def test_another_query_encoder_reads_passages_as_it_reads_fresh_documents(corpus: Path) -> None:
    partner = Partner()
    snapshot = built(corpus, partner)
    facts, correction = snapshot.manifest.correction, snapshot.correction
    assert facts is not None
    assert correction is not None
    assert set(facts.encoders) == names_of(partner) > {"partner"}
    assert facts.passages == len(partner.texts) == ROWS
    assert set(partner.sides) == {Side.QUERY}  # the only side it supports
    assert partner.texts[3] == "标题3\n第3次复查。第3次复查。第3次复查。"
    read = Partner().encode(partner.texts, Side.QUERY).astype(np.float16)
    np.testing.assert_array_equal(np.load(snapshot.folder / "correction.npy"), read)
    known = Correction.fit(read, snapshot.values)
    np.testing.assert_array_equal(correction.matrix, known.matrix)
    np.testing.assert_array_equal(correction.offset, known.offset)


def test_a_large_corpus_is_sampled(tmp_path: Path) -> None:
    rows = [{"_id": f"{row}", "text": f"第{row}次复查"} for row in range(2 * SAMPLE + 1)]
    partner = Partner()
    snapshot = built(write_lines(tmp_path / "corpus.jsonl", *rows), partner)
    assert partner.texts[:3] == ["第0次复查", "第2次复查", "第4次复查"]
    assert len(partner.texts) == SAMPLE
    assert snapshot.correction is snapshot.correction  # fitted once


def test_builds_of_the_same_corpus_have_the_same_correction(corpus: Path) -> None:
    first, second = (built(corpus, Partner()).manifest for _ in range(2))
    assert (first.content, first.correction) == (second.content, second.correction)
    assert first.content != built(corpus, None).manifest.content


@pytest.mark.parametrize("query_encoder", [None, FastEncoder()])
def test_one_encoder_for_both_sides_needs_no_correction(corpus: Path, query_encoder: FastEncoder | None) -> None:
    snapshot = built(corpus, query_encoder)
    assert (snapshot.correction, snapshot.manifest.correction) == (None, None)
    assert not (snapshot.folder / "correction.npy").exists()


def test_another_graph_of_the_same_folder_is_the_same_encoder(corpus: Path) -> None:
    partner = Partner()
    document = FastEncoder(sorted(partner.spec.fingerprints)[0])
    options = BuildOptions(passage_tokens=64, overlap=8, query_encoder=partner)
    summary = build([corpus], document, Collection(corpus.parent / "collection"), options)
    assert Manifest.read(summary.folder).correction is None


def test_a_correction_that_does_not_fit_is_refused(corpus: Path) -> None:
    folder = built(corpus, Partner()).folder
    np.save(folder / "correction.npy", np.zeros((ROWS, DIM - 1), np.float16))
    with pytest.raises(BadSnapshot, match=r"correction\.npy"):
        Snapshot.open(folder)
    manifest = Manifest.read(folder)
    files = {name: entry for name, entry in list_files(folder).items() if name != MANIFEST_FILE}
    manifest.model_copy(update={"files": files}).write(folder)
    with pytest.raises(BadSnapshot, match=r"correction\.npy holds"):
        Snapshot.open(folder)


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_invalid_vectors_of_the_query_encoder_are_refused(corpus: Path, value: float) -> None:
    """One NaN would make every corrected vector NaN, and no fresh document would ever be found."""

    class Broken(Partner):
        def encode(self, texts: Sequence[str], side: Side) -> Vectors:
            vectors = super().encode(texts, side)
            vectors[3] = value
            return vectors

    with pytest.raises(BadBuild, match=f"the query encoder gave a vector of length {value}"):
        built(corpus, Broken())


def test_format_3_without_a_correction_is_still_read(corpus: Path) -> None:
    folder = built(corpus, None).folder
    manifest = Manifest.read(folder)
    manifest.model_copy(update={"format": 3}).write(folder)
    fields = json.loads((folder / MANIFEST_FILE).read_bytes())
    assert fields["correction"] is None
    assert Snapshot.open(folder).correction is None


def test_a_query_encoder_that_cannot_read_queries_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "reads-documents"
    shutil.copytree(BUNDLED, folder)
    EncoderSpec.load(folder).model_copy(update={"sides": (Side.DOCUMENT,)}).save(folder)
    with pytest.raises(BadBuild, match="reads-documents reads documents only"):
        Encoders(BUNDLED, queries=folder).load_queries(FastEncoder())


def test_an_incompatible_query_encoder_is_refused_before_the_build() -> None:
    documents = FastEncoder()
    with pytest.raises(BadBuild, match=r"gives 512 dimensions, .* 64"):
        Encoders(Path("documents"), queries=BUNDLED).load_queries(documents)
    assert documents.texts == []

"""Small snapshots and corpora for the tests of the indexer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexer.build import BuildSummary
from indexer.checks import Changes
from indexer.report import Outcome
from indexer.store.collection import Collection
from indexer.store.documents import HASH_BYTES
from indexer.store.filters import Value
from indexer.store.kinds import IndexKind
from indexer.store.manifest import Built, Counts, DocumentEncoder, Manifest, Recall
from indexer.store.writer import SnapshotWriter
from models.encoder.spec import Variant

DIM = 16


@dataclass
class Entry:
    """A document and its passages; None stands for one passage."""

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Value] = field(default_factory=dict)
    spans: Sequence[tuple[int, int]] | None = None


ENTRIES = [
    Entry("drug-1", "阿司匹林抑制血小板聚集。", "阿司匹林", {"kind": "drug", "year": 2020, "tags": ["血液", "心脏"]}),
    Entry("drug-2", "Metformin lowers glucose.", "Metformin", {"kind": "drug", "year": 2022.5, "otc": False}),
    Entry("disease-1", "高血压是心脏病的危险因素。", "高血压", {"kind": "disease", "tags": "心脏", "otc": None}),
    Entry("test-1", "血常规检查。白细胞升高提示感染。", "血常规", {"updated": "2025-03-01"}, [(0, 6), (6, 16)]),
]


_SUMMARY = BuildSummary(
    version="20261115T041500123Z-1a2b3c4d",
    folder=Path("versions/20261115T041500123Z-1a2b3c4d"),
    counts=Counts(documents=400, passages=426, rejects=3),
    changes=Changes(added=12, changed=5, removed=2),
    encoded=20,
    reused=406,
    index=IndexKind.HNSW,
    recall=Recall(at_10=0.9984, queries=200, floor=0.95),
    rejects_file=Path("rejects/x.jsonl"),
    seconds={"read": 0.25, "encode": 11.0},
)
RUN = Outcome("built it", 12.3, _SUMMARY)


def unit_vectors(count: int, dim: int = DIM, seed: int = 0, clusters: int = 0) -> NDArray[np.float16]:
    """Makes random directions, around `clusters` centres if there are any, as embeddings are."""
    generator = np.random.default_rng(seed)
    vectors = generator.standard_normal((count, dim))
    if clusters:
        vectors = 0.5 * vectors + generator.standard_normal((clusters, dim))[generator.integers(clusters, size=count)]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f2")


def write_snapshot(
    folder: Path,
    entries: Sequence[Entry] = ENTRIES,
    *,
    version: str = "v1",
    kind: IndexKind = IndexKind.FLAT,
    space: str = "test-space",
    dim: int = DIM,
) -> Manifest:
    """Writes a whole snapshot of the entries, with random vectors instead of embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    with SnapshotWriter(folder) as writer:
        for entry in entries:
            spans = entry.spans or [(0, len(entry.text))]
            hashes = np.zeros((len(spans), HASH_BYTES), dtype=np.uint8)
            writer.add(entry.id, entry.title, entry.text, entry.metadata, spans, hashes)
        documents, passages, _ = writer.close_documents()
        vectors = writer.write_vectors([unit_vectors(len(passages), dim)], dim)
        writer.write_index(vectors, kind)
        every = map(documents.get, range(len(documents)))
        writer.write_lexical((f"{each.title}\n{each.text}" for each in every), passages.first_rows())
        return writer.finish(facts(version, kind, space, dim, len(documents), len(passages)))


def facts(version: str, kind: IndexKind, space: str, dim: int, documents: int, passages: int) -> Manifest:
    return Manifest(
        version=version,
        space=space,
        encoder=DocumentEncoder(fingerprint="0" * 16, variant=Variant.INT8),
        dim=dim,
        counts=Counts(documents=documents, passages=passages, rejects=0),
        built=Built(
            index=kind,
            index_parameters={},
            search_depth=0,
            recall=None,
            passage_tokens=512,
            passage_overlap=64,
            care_version="0",
            created=datetime(2026, 1, 1, tzinfo=UTC),
        ),
    )


def add_version(collection: Collection, moment: datetime, *, space: str = "test-space", dim: int = DIM) -> str:
    """Adds a finished, unpublished version to the collection."""
    version = collection.next_version(moment)
    with collection.building(version) as folder:
        write_snapshot(folder, version=version, space=space, dim=dim)
    return version


def write_lines(path: Path, *rows: object) -> Path:
    """Writes a JSON-lines file; a row of bytes is written unchanged."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path

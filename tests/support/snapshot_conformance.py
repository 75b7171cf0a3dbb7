"""Checks that a snapshot answers on this machine as on the one that built it.

  pytest -s tests/integration/test_snapshot_conformance.py --snapshots FOLDER

An empty FOLDER is filled: a version of every kind of index, and its answers. A filled one, from another machine, is
compared: every checksum, every document, every top 10.

The corpus and the queries are the examples. A snapshot is searched with the vectors that were written with it, so that
a difference is the snapshot's. The encoder is compared with those vectors separately: rounding depends on the CPU.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from indexer.build import BuildOptions, build
from indexer.checks import TOP, load_queries, top_documents
from indexer.encode import Encoder
from indexer.store.arrays import Mask, Rows, Scores
from indexer.store.collection import Collection
from indexer.store.filters import Range
from indexer.store.kinds import IndexKind
from indexer.store.snapshot import Snapshot
from indexer.versions import publish
from models.encoder.onnx import Vectors
from models.encoder.spec import Side

CORPUS = Path("examples/corpus.jsonl")
QUERIES = Path("examples/queries.jsonl")
# CAGRA is left out: only a GPU can build it.
KINDS = tuple(kind for kind in IndexKind if kind is not IndexKind.CAGRA)
# Short passages: whole documents would be too few for lists. One thread: a graph is then the same in every build.
PASSAGE_TOKENS, OVERLAP, THREADS = 64, 16, 1
# Recall is not tested here, and with vectors of a stand-in it is low.
NO_FLOOR = 0.0
# Admits more passages than are scored one by one, so that the index itself is searched with a filter.
FILTER = Range("updated", gte="2024")
# The worst effect of a batch on a query (docs/reliability.md): a CPU may not cost more.
LEAST_COSINE = 0.995


class Ranking(BaseModel):
    """Passage rows and their scores, best first."""

    rows: list[int]
    scores: list[float]


class Answers(BaseModel):
    """Answers of a snapshot: a digest of each document as it is read back, and the rankings of the queries."""

    documents: list[str]
    rankings: dict[str, list[Ranking]]


class Record(BaseModel):
    """Answers of the machine that built the collection, by version; `hybrid` are ids, by its own encoder."""

    machine: str
    queries: list[str]
    versions: dict[str, Answers]
    hybrid: list[list[str]]


@dataclass(frozen=True, slots=True)
class Compared:
    """How many answers of a version are the same here, and how far their scores differ."""

    kind: IndexKind
    what: str
    same: int
    count: int
    apart: float | None = None

    def __str__(self) -> str:
        scores = "" if self.apart is None else f", scores within {self.apart:.1e}"
        return f"{self.kind:7} {self.what:9} {self.same} of {self.count} the same{scores}"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors of the queries by this machine's encoder against the written ones: cosines and agreement of rankings.

    Each agreement has the number of equal top-10 rankings and the mean shared part of ten: of passages by
    vectors, and of documents in mode hybrid.
    """

    cosines: Vectors
    passages: tuple[int, float]
    documents: tuple[int, float]

    @property
    def least(self) -> float:
        return float(self.cosines.min())

    def __str__(self) -> str:
        cosines = f"cosine {self.cosines.mean():.5f}, least {self.least:.5f}"
        ways = {"vectors": self.passages, "hybrid": self.documents}
        found = [
            f"{way} {same} of {len(self.cosines)} the same, overlap {share:.3f}" for way, (same, share) in ways.items()
        ]
        return "; ".join([f"encoder: {cosines}", *found])


def write(folder: Path, encoder: Encoder) -> Record:
    """Writes a version of each kind over the same vectors, publishes the last one, and records its answers."""
    collection = Collection(folder / "collection")
    asked = load_queries(QUERIES)
    vectors = encoder.encode(asked, Side.QUERY)
    versions: dict[str, Answers] = {}
    for kind in KINDS:
        options = BuildOptions(
            passage_tokens=PASSAGE_TOKENS, overlap=OVERLAP, index=kind, recall_floor=NO_FLOOR, threads=THREADS
        )
        built = build([CORPUS], encoder, collection, options)
        versions[built.version] = answers_of(Snapshot.open(built.folder), asked, vectors)
    publish(collection)
    hybrid = top_documents(_first(collection, versions), encoder, asked)
    record = Record(machine=platform.machine(), queries=asked, versions=versions, hybrid=hybrid)
    np.save(folder / "vectors.npy", vectors)
    (folder / "expected.json").write_text(record.model_dump_json(), encoding="utf-8")
    return record


def answers_of(snapshot: Snapshot, queries: Sequence[str], vectors: Vectors) -> Answers:
    """Returns everything that must not depend on the machine."""
    allowed = snapshot.metadata.select([FILTER])[snapshot.passages.documents]
    rankings = {
        "vectors": _dense(snapshot, vectors),
        "filtered": _dense(snapshot, vectors, allowed),
        "words": [_ranking(*snapshot.lexical.search(query, TOP)) for query in queries],
    }
    return Answers(documents=[_digest(snapshot, row) for row in range(len(snapshot.documents))], rankings=rankings)


def compare(folder: Path) -> Iterator[Compared]:
    """Opens every version with all its checksums and repeats the recorded searches."""
    record, collection = _read(folder), Collection(folder / "collection")
    vectors = np.load(folder / "vectors.npy")
    for version, expected in record.versions.items():
        snapshot = Snapshot.open(collection.folder(version))
        kind, found = snapshot.manifest.built.index, answers_of(snapshot, record.queries, vectors)
        same = [one == other for one, other in zip(expected.documents, found.documents, strict=True)]
        yield Compared(kind, "documents", sum(same), len(same))
        for way, rankings in expected.rankings.items():
            pairs = list(zip(rankings, found.rankings[way], strict=True))
            equal = [(one.scores, other.scores) for one, other in pairs if one.rows == other.rows]
            apart = max((abs(a - b) for one, other in equal for a, b in zip(one, other, strict=True)), default=0.0)
            yield Compared(kind, way, len(equal), len(pairs), apart)


def encode_again(folder: Path, encoder: Encoder) -> Encoded:
    """Encodes the queries on this machine, and searches with them in the first version."""
    record, collection = _read(folder), Collection(folder / "collection")
    written, own = np.load(folder / "vectors.npy"), encoder.encode(record.queries, Side.QUERY)
    snapshot = _first(collection, record.versions)
    passages = [[one.rows for one in _dense(snapshot, vectors)] for vectors in (written, own)]
    documents = record.hybrid, top_documents(snapshot, encoder, record.queries)
    return Encoded(np.sum(written * own, axis=1), _agreement(*passages), _agreement(*documents))


def _read(folder: Path) -> Record:
    return Record.model_validate_json((folder / "expected.json").read_bytes())


def _first(collection: Collection, versions: Iterable[str]) -> Snapshot:
    return Snapshot.open(collection.folder(next(iter(versions))))


def _dense(snapshot: Snapshot, vectors: Vectors, allowed: Mask | None = None) -> list[Ranking]:
    scores, rows = snapshot.vectors.search(vectors, TOP, allowed)
    return [_ranking(*ranking) for ranking in zip(rows, scores, strict=True)]


def _ranking(rows: Rows, scores: Scores) -> Ranking:
    return Ranking(rows=rows.tolist(), scores=scores.tolist())


def _digest(snapshot: Snapshot, row: int) -> str:
    """Hashes a document, found by its id, and its passages."""
    stored = snapshot.documents.get(row)
    spans = [snapshot.passages.span(passage) for passage in snapshot.passages.of(row)]
    fields = [snapshot.documents.row_of(stored.id), stored.id, stored.title, stored.text, stored.metadata, spans]
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _agreement(ones: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> tuple[int, float]:
    pairs = list(zip(ones, others, strict=True))
    shared = [len(set(one) & set(other)) / TOP for one, other in pairs]
    return sum(one == other for one, other in pairs), sum(shared) / len(shared)


def differences(folder: Path, encoder: Encoder) -> list[str]:
    """Prints the comparison; returns a line for every difference."""
    print(f"written on {_read(folder).machine}, read on {platform.machine()}")
    compared, encoded = list(compare(folder)), encode_again(folder, encoder)
    print("\n".join(map(str, [*compared, encoded])))
    found = [str(one) for one in compared if one.same != one.count]
    # Written so that a NaN, which compares false with everything, differs too.
    return found if encoded.least >= LEAST_COSINE else [*found, str(encoded)]

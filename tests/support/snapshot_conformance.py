"""Does a snapshot answer on this machine as it did on the one that built it?

  pytest -s tests/integration/test_snapshot_conformance.py --snapshots FOLDER

An empty FOLDER is filled: a version of every kind of index, and what it answers. One that was filled, on another
machine, is compared: every checksum, every document, every top 10.

The corpus and the queries are the examples. A snapshot is asked by the vectors that were written with it, so that a
difference is its own. The encoder of this machine is held against those vectors apart: it rounds as its processor does.
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
# A graph that only a GPU can build is left out.
KINDS = tuple(kind for kind in IndexKind if kind is not IndexKind.CAGRA)
# Short passages: whole documents would be too few for lists. One thread: a graph is then the same in every build.
PASSAGE_TOKENS, OVERLAP, THREADS = 64, 16, 1
# How much an index finds is not the question, and among a stand-in's vectors none finds much.
NO_FLOOR = 0.0
# Admits more passages than are scored one by one, so that the index itself is asked with a filter.
FILTER = Range("updated", gte="2024")
# What a query loses in the worst company of a batch (docs/reliability.md): no processor may cost more.
LEAST_COSINE = 0.995


class Ranking(BaseModel):
    """Passage rows and their scores, best first."""

    rows: list[int]
    scores: list[float]


class Answers(BaseModel):
    """What a snapshot says: a digest of each document as it is read back, and the queries' rankings in each way."""

    documents: list[str]
    rankings: dict[str, list[Ranking]]


class Record(BaseModel):
    """What the machine said that built the collection, by version; `hybrid` are ids, by its own encoder."""

    machine: str
    queries: list[str]
    versions: dict[str, Answers]
    hybrid: list[list[str]]


@dataclass(frozen=True, slots=True)
class Compared:
    """How many of the things written for a version are the same here, and how far their scores, if any, are apart."""

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
    """The queries' vectors by this machine's encoder beside the written ones: cosines, and what either finds.

    Both agreements are how many rankings of ten are equal, and the mean share of ten that both have: of passages by
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
    """A version of each kind over the same vectors, the last one published, and what they answer."""
    collection = Collection(folder / "collection")
    asked = load_queries(QUERIES)
    vectors = encoder.encode(asked, Side.QUERY)
    versions: dict[str, Answers] = {}
    for kind in KINDS:
        options = BuildOptions(
            passage_tokens=PASSAGE_TOKENS, overlap=OVERLAP, index=kind, recall_floor=NO_FLOOR, threads=THREADS
        )
        built = build([CORPUS], encoder, collection, options)
        versions[built.version] = ask(Snapshot.open(built.folder), asked, vectors)
    publish(collection)
    hybrid = top_documents(_first(collection, versions), encoder, asked)
    record = Record(machine=platform.machine(), queries=asked, versions=versions, hybrid=hybrid)
    np.save(folder / "vectors.npy", vectors)
    (folder / "expected.json").write_text(record.model_dump_json(), encoding="utf-8")
    return record


def ask(snapshot: Snapshot, queries: Sequence[str], vectors: Vectors) -> Answers:
    """Everything that must not depend on the machine."""
    allowed = snapshot.metadata.select([FILTER])[snapshot.passages.documents]
    rankings = {
        "vectors": _dense(snapshot, vectors),
        "filtered": _dense(snapshot, vectors, allowed),
        "words": [_ranking(*snapshot.lexical.search(query, TOP)) for query in queries],
    }
    return Answers(documents=[_digest(snapshot, row) for row in range(len(snapshot.documents))], rankings=rankings)


def compare(folder: Path) -> Iterator[Compared]:
    """Opens every version with all its checksums and asks it what was asked where it was written."""
    record, collection = _read(folder), Collection(folder / "collection")
    vectors = np.load(folder / "vectors.npy")
    for version, expected in record.versions.items():
        snapshot = Snapshot.open(collection.folder(version))
        kind, found = snapshot.manifest.built.index, ask(snapshot, record.queries, vectors)
        same = [one == other for one, other in zip(expected.documents, found.documents, strict=True)]
        yield Compared(kind, "documents", sum(same), len(same))
        for way, rankings in expected.rankings.items():
            pairs = list(zip(rankings, found.rankings[way], strict=True))
            equal = [(one.scores, other.scores) for one, other in pairs if one.rows == other.rows]
            apart = max((abs(a - b) for one, other in equal for a, b in zip(one, other, strict=True)), default=0.0)
            yield Compared(kind, way, len(equal), len(pairs), apart)


def encode_again(folder: Path, encoder: Encoder) -> Encoded:
    """What this machine's encoder makes of the queries, and finds in the first version."""
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
    """Of a document, found by its id, and of its passages."""
    stored = snapshot.documents.get(row)
    spans = [snapshot.passages.span(passage) for passage in snapshot.passages.of(row)]
    fields = [snapshot.documents.row_of(stored.id), stored.id, stored.title, stored.text, stored.metadata, spans]
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _agreement(ones: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> tuple[int, float]:
    pairs = list(zip(ones, others, strict=True))
    shared = [len(set(one) & set(other)) / TOP for one, other in pairs]
    return sum(one == other for one, other in pairs), sum(shared) / len(shared)


def differences(folder: Path, encoder: Encoder) -> list[str]:
    """Prints the comparison; returns a line for everything that differs from where the folder was written."""
    print(f"written on {_read(folder).machine}, read on {platform.machine()}")
    compared, encoded = list(compare(folder)), encode_again(folder, encoder)
    print("\n".join(map(str, [*compared, encoded])))
    found = [str(one) for one in compared if one.same != one.count]
    # Written so that a NaN, which compares false with everything, differs too.
    return found if encoded.least >= LEAST_COSINE else [*found, str(encoded)]

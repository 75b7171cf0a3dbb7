"""Checks a version: recall of its index, its answers, its canaries, and what differs from another version.

Suggests the kind of index for a collection on a CPU: builds each over a sample of its vectors and measures it. Time and
memory at the full size are extrapolated: exact search grows linearly, a graph with the logarithm, lists with the square
root. The build measures the recall of the real index.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
import orjson

from indexer.encode import Encoder
from indexer.errors import BadBuild, BadQueries, BadSnapshot, Blocked
from indexer.passages import SENTENCE_ENDS
from indexer.store.arrays import Array, Rows
from indexer.store.canaries import CANARIES_FILE, TOP, Canary, failures_of
from indexer.store.collection import Collection
from indexer.store.documents import COMPARED_FILES, Documents
from indexer.store.faiss_index import build_index
from indexer.store.fresh_log import Cursor
from indexer.store.kinds import INDEX_FILE, LEAST_ROWS_FOR_LISTS, IndexKind
from indexer.store.manifest import Recall
from indexer.store.overlay import SOME_WORD, Overlay
from indexer.store.snapshot import Snapshot
from indexer.store.vectors import VectorIndex, limit_threads
from models.correction import sample_rows
from models.encoder.onnx import Vectors
from models.encoder.spec import Side
from models.fusion import CANDIDATES, LATER_DENSE, LATER_LEXICAL, Fusion, best_passages, fuse
from models.lexical import Ranking

FLOOR = 0.95
# A graph is searched deeper than the floor asks for. What it misses is missing from the answers: a recall of 0.989 cost
# 0.7 points of nDCG@10, 0.998 cost 0.16 (docs/benchmarks.md).
GRAPH_RECALL = 0.998
QUERIES = 200
K = 10
LONGEST_QUERY = 64
# Two ways to the same sum may differ in their last digits; rows that tie with the tenth count as found.
TIE = 1e-5
BLOCK = 1 << 18
_END = re.compile(f"[{re.escape(''.join(SENTENCE_ENDS))}]|\\. ")


class VectorSearch(Protocol):
    """An index over `values` (passages, dim): a snapshot's own, or a database's."""

    @property
    def kind(self) -> IndexKind: ...
    @property
    def values(self) -> Array: ...
    def search(self, queries: Vectors, k: int, *, depth: int | None = None) -> tuple[Vectors, Rows]: ...
    def search_exactly(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]: ...


@dataclass(frozen=True, slots=True)
class Changes:
    """How many documents are new, differ, or are gone (`withdrawn`: deleted by the service), of `before`."""

    added: int
    changed: int
    removed: int
    withdrawn: int = field(default=0, compare=False)
    before: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentDiff:
    """Document rows, ascending: `added` and `changed` of the new version, `removed` of the old one."""

    added: Rows
    changed: Rows
    removed: Rows


@dataclass(frozen=True, slots=True)
class ChangedAnswer:
    """A query whose ten best documents changed: ids that came and went; if both are empty, only the order changed."""

    query: str
    came: list[str]
    went: list[str]


def load_queries(path: Path) -> list[str]:
    """Reads queries, one {"text": …} a line, as evaluation sets and the load test have them."""
    try:
        lines = path.read_bytes().splitlines()
        queries = [str(orjson.loads(line)["text"]) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadQueries(f'{path} is not a file of queries ({error!r}); write one {{"text": …}} a line') from error
    if not queries:
        raise BadQueries(f"{path} holds no query")
    return queries


def sample_queries(documents: Documents, count: int = QUERIES) -> list[str]:
    """Makes queries of titles or first sentences of documents at equal distances."""
    sample = map(documents.get, sample_rows(len(documents), count).tolist())
    texts = (document.title.strip() or document.text.strip() for document in sample)
    return [_END.split(text, maxsplit=1)[0][:LONGEST_QUERY] or text[:LONGEST_QUERY] for text in texts]


def recall_queries(encoder: Encoder, documents: Documents, given: Sequence[str] = ()) -> Vectors:
    """Encodes the queries that measure recall: the given ones, or the first halves of titles and first sentences.

    A whole title is the easiest query there is: the graph leads straight to its document. Its half finds as much as
    real queries do. Encodes by the query side; by the document side if the encoder reads documents only.
    """
    queries = given or [text[: -(-len(text) // 2)] for text in sample_queries(documents)]
    return encoder.encode(queries, Side.QUERY if Side.QUERY in encoder.spec.sides else Side.DOCUMENT)


def measure_recall(index: VectorSearch, queries: Vectors, depth: int) -> float:
    """Returns the average share of the ten best rows that the index finds at this depth."""
    k = min(K, len(index.values))
    exact, _ = index.search_exactly(queries, k)
    found, _ = index.search(queries, k, depth=depth)
    return float((found >= exact[:, -1:] - TIE).mean())


def choose_depth(index: VectorSearch, queries: Vectors, floor: float) -> tuple[int, Recall]:
    """Finds the least depth whose recall reaches the floor, for a graph also GRAPH_RECALL, or else the greatest depth.

    Raises BadBuild if even the greatest does not reach the floor.
    """
    goal = max(floor, GRAPH_RECALL) if index.kind.is_graph else floor
    depth, recall = 0, 0.0
    for depth in index.kind.depths(len(index.values)):
        recall = measure_recall(index, queries, depth)
        if recall >= goal:
            break
    if recall >= floor:
        return depth, Recall(at_10=round(recall, 4), queries=len(queries), floor=floor)
    raise BadBuild(
        f"the {index.kind} index finds {recall:.3f} of the exact ten best passages, the floor is {floor:g}: choose "
        "another kind (care index suggest) or a lower --recall-floor"
    )


def top_documents(
    snapshot: Snapshot,
    encoder: Encoder,
    queries: Sequence[str],
    k: int = TOP,
    *,
    vectors: VectorSearch | None = None,
    overlay: Overlay | None = None,
) -> list[list[str]]:
    """Finds the ids of the `k` best documents of each query, as the service does by default: hybrid, no filters.

    `vectors` searches instead of the snapshot's own index, `overlay` has the documents posted and deleted since.
    """
    overlay = overlay or Overlay(snapshot)
    per_document = -(-len(snapshot.passages) // len(snapshot.documents))
    wanted = max(CANDIDATES, k) * per_document + int(np.count_nonzero(overlay.hidden))
    depth = min(len(snapshot.passages), wanted)
    embedded = encoder.encode(queries, Side.QUERY)
    found = (vectors or snapshot.vectors).search(embedded, depth)
    answers = []
    for query, scores, rows, fresh in zip(queries, *found, overlay.score_vectors(embedded), strict=True):
        main = rows[rows >= 0], scores[rows >= 0]
        dense = _documents(overlay, main, overlay.pick(fresh, (), -np.inf), LATER_DENSE)
        words = overlay.pick(overlay.score_words(query), (), SOME_WORD)
        lexical = _documents(overlay, snapshot.lexical.search(query, depth), words, LATER_LEXICAL)
        best, _ = fuse(dense, lexical, Fusion.SCORES, trust=encoder.spec.dense_trust)
        answers.append([overlay.document(row).id for row in best[:k].tolist()])
    return answers


def _documents(overlay: Overlay, main: Ranking, fresh: Ranking, later: float) -> Ranking:
    """Joins rankings of the snapshot's and of fresh passages into one of documents by their best passages."""
    main = overlay.visible(*main)
    rows, scores = np.concatenate([main[0], fresh[0]]), np.concatenate([main[1], fresh[1]])
    documents, _, best = best_passages(rows, scores, overlay.documents_of, later)
    return documents[:CANDIDATES], best[:CANDIDATES]


def check_canaries(collection: Collection, version: str, encoder: Encoder, canaries: list[Canary]) -> None:
    """Runs canaries against a version as it would be served, fresh documents and database included; raises Blocked."""
    snapshot = Snapshot.open(collection.folder(version), verify=False)
    snapshot.manifest.require_encoder(encoder.spec)
    frames, _ = collection.fresh_log.read(Cursor(snapshot.manifest.fresh.position))
    overlay = Overlay(snapshot).apply(frames)
    queries, most = [canary.query for canary in canaries], max(canary.within for canary in canaries)
    with closing(collection.database.connect()) if collection.database else nullcontext() as connected:
        vectors = connected.open(snapshot) if connected else None
        answers = top_documents(snapshot, encoder, queries, most, vectors=vectors, overlay=overlay)
    if failures := failures_of(canaries, answers):
        correct = f"{failures}. Correct the corpus or {collection.root / CANARIES_FILE}"
        if version == collection.current():
            raise Blocked(f"{version}, which is served, is not as it should be: {correct}")
        raise Blocked(f"{version} is not published: {correct}, or run care index publish --force")


def compare_documents(old: Documents, new: Documents) -> DocumentDiff:
    """Matches documents by the hashes of their ids and compares their digests; reads no text."""
    added, changed, removed = [], [], []
    for new_rows, old_rows in _matches(new, old):
        added.append(new_rows[old_rows < 0])
        new_rows, old_rows = new_rows[old_rows >= 0], old_rows[old_rows >= 0]
        changed.append(new_rows[(new.digests(new_rows) != old.digests(old_rows)).any(axis=1)])
    for old_rows, new_rows in _matches(old, new):
        removed.append(old_rows[new_rows < 0])
    return DocumentDiff(*(np.sort(np.concatenate(rows)) for rows in (added, changed, removed)))


def _matches(ours: Documents, theirs: Documents) -> Iterator[tuple[Rows, Rows]]:
    """Yields every document row of `ours`, in blocks, and the row of the same id in `theirs`, −1: none."""
    for start in range(0, len(ours), BLOCK):
        hashes = ours.id_hashes[start : start + BLOCK]
        places = np.minimum(np.searchsorted(theirs.id_hashes, hashes), len(theirs) - 1)
        rows = np.where(theirs.id_hashes[places] == hashes, theirs.id_rows[places], -1)
        yield ours.id_rows[start : start + BLOCK].astype(np.int64), rows.astype(np.int64)


def changes_since_published(collection: Collection, new: Documents, deleted: Iterable[str] = ()) -> Changes:
    """Compares with the served version, if a sound one is served; `deleted` are ids that the service deleted."""
    try:
        if (served := collection.served_manifest()) is None:
            return Changes(len(new), 0, 0)
        folder = collection.folder(served.version)
        served.verify_files(folder, COMPARED_FILES)
        old = Documents.open(folder, served.counts.documents)
    except BadSnapshot:
        return Changes(len(new), 0, 0)
    diff = compare_documents(old, new)
    withdrawn = sum(old.row_of(each) is not None and new.row_of(each) is None for each in deleted)
    return Changes(len(diff.added), len(diff.changed), len(diff.removed), withdrawn, len(old))


def compare_answers(old: Snapshot, new: Snapshot, encoder: Encoder, queries: Sequence[str]) -> list[ChangedAnswer]:
    """Returns the queries whose ten best documents differ."""
    answers = zip(queries, top_documents(old, encoder, queries), top_documents(new, encoder, queries), strict=True)
    return [
        ChangedAnswer(query, [one for one in after if one not in before], [one for one in before if one not in after])
        for query, before, after in answers
        if before != after
    ]


SAMPLE_ROWS = 20_000
TIMED_QUERIES = 100


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind over the sample, and its expected cost at the full size. `recall` is None below the floor."""

    kind: IndexKind
    recall: float | None
    depth: int
    sample_ms: float
    expected_ms: float
    expected_bytes: int


def measure_kinds(vectors: Array, queries: Vectors, passages: int, floor: float) -> list[Measured]:
    """Measures every kind that `vectors` (rows, dim) float16 allow, for a collection of `passages`; one thread."""
    count = min(len(vectors), SAMPLE_ROWS)
    sample = vectors[np.linspace(0, len(vectors) - 1, count, dtype=np.int64)]
    # CAGRA is for GPUs, which no measurement on a CPU can judge.
    here = [kind for kind in IndexKind if kind is not IndexKind.CAGRA]
    kinds = [kind for kind in here if not kind.has_lists or count >= LEAST_ROWS_FOR_LISTS]
    limit_threads(1)
    with tempfile.TemporaryDirectory(prefix="care-suggest-") as folder:
        return [_measure(kind, sample, queries, passages, floor, Path(folder, kind)) for kind in kinds]


def propose(measured: list[Measured], memory_bytes: int) -> Measured:
    """Returns the quickest kind that reaches the floor and fits; raises BadBuild if none does."""
    fitting = [one for one in measured if one.recall is not None and one.expected_bytes <= memory_bytes]
    if not fitting:
        least = min(one.expected_bytes for one in measured if one.recall is not None)
        needs = f"no kind fits into {memory_bytes / 1e6:.0f} MB: the smallest needs {least / 1e6:.0f} MB"
        raise BadBuild(f"{needs}; allow more (--memory-mb), or search in a database (CARE_VECTORS)")
    return min(fitting, key=lambda one: one.expected_ms)


def _measure(kind: IndexKind, sample: Array, queries: Vectors, passages: int, floor: float, folder: Path) -> Measured:
    folder.mkdir()
    build_index(sample, kind, folder / INDEX_FILE)
    index = VectorIndex.open(folder, kind, sample)
    try:
        depth, recall = choose_depth(index, queries, floor)
        found: float | None = recall.at_10
    except BadBuild:
        depth, found = kind.depths(len(sample))[-1], None
    times = []
    for query in queries[:TIMED_QUERIES]:
        began = perf_counter()
        index.search(query[np.newaxis], K, depth=depth)
        times.append(perf_counter() - began)
    milliseconds = float(np.median(times)) * 1000
    added = (folder / INDEX_FILE).stat().st_size if kind is not IndexKind.FLAT else 0
    # Lists read only a few hundred vectors, which may come from the disk; other kinds read vectors all over.
    per_row = added / len(sample) + (0 if kind.has_lists else sample.itemsize * sample.shape[1])
    if kind.is_graph:
        growth = math.log(max(2, passages)) / math.log(max(2, len(sample)))
    else:
        growth = (passages / len(sample)) ** (1.0 if kind is IndexKind.FLAT else 0.5)
    return Measured(kind, found, depth, milliseconds, milliseconds * growth, int(per_row * passages))

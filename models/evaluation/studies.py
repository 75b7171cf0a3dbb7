"""Studies of an encoder on a retrieval set: short vectors, speed of indexes, similarities of answers and others.

Each takes the set and its embeddings, unit rows in the set's order, and gives the curves of a picture. Two of them cost
about a search of the set; building indexes costs up to twelve seconds of a core, so it is done once for a corpus.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import faiss
import numpy as np
from numpy.typing import NDArray

from models.evaluation.judge import mean_percent, ranked
from models.evaluation.readers import unit
from models.evaluation.results import Curve
from models.evaluation.sets import RetrievalSet
from models.evaluation.systems import score_rows, search

DIMENSIONS, INDEXES, SIMILARITIES = "dimensions", "indexes", "similarities"
POSITIVES, HARD_NEGATIVES, RANDOM_NEGATIVES = "answers", "hardest others", "random others"
FLAT, HNSW, IVF = "exact", "HNSW, by efSearch", "IVF, by lists probed"

WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
METRIC, DEPTH = "nDCG@10", 10
# The graph is the one that the indexer builds; a list of the inverted file holds some tens of documents at least.
HNSW_LINKS, HNSW_EF_CONSTRUCTION = 32, 200
EF_SEARCH = (10, 20, 40, 80, 160)
PROBES = (1, 2, 4, 8, 16, 32)
IVF_LIST_DOCUMENTS, IVF_ITERATIONS = 40, 10
INDEXED_DOCUMENTS = 10_000
TIMED_QUERIES = 500
TIMED_SECONDS = 0.25
BIN_WIDTH = 0.04
RANDOM_PER_QUERY = 10
SEED = 20_000

Embeddings = NDArray[np.float32]


def dimension_sweep(data: RetrievalSet, system: str, queries: Embeddings, documents: Embeddings) -> Curve:
    """nDCG@10 of the first dimensions alone: cut off, brought back to unit length, and searched exactly."""
    grades, full = data.grades(), queries.shape[1]
    points = []
    for width in (*(width for width in WIDTHS if width < full), full):
        rankings = [rows for rows, _ in search(unit(queries[:, :width]), unit(documents[:, :width]), DEPTH)]
        points.append((float(width), mean_percent(ranked(grades, rankings, [METRIC])[METRIC])))
    return Curve(DIMENSIONS, data.name, system, system, "dimensions", METRIC, points)


def index_speed(data: RetrievalSet, system: str, queries: Embeddings, documents: Embeddings) -> list[Curve]:
    """Recall@10 against exact search, and queries per second of one thread that is asked one query at a time.

    A large corpus is represented by a part of it, so that the graph is built in seconds.
    """
    queries = np.ascontiguousarray(queries[:TIMED_QUERIES])
    if len(documents) > INDEXED_DOCUMENTS:
        documents = np.random.default_rng(SEED).choice(documents, INDEXED_DOCUMENTS, replace=False)
    flat = faiss.IndexFlatIP(documents.shape[1])
    flat.add(documents)
    depth = min(DEPTH, len(documents))
    # Equal documents tie: a hit counts by its score, so that it does not matter which of them an index returns.
    bar = flat.search(queries, depth)[0][:, -1:] - 1e-5

    def curve(line: str, index: faiss.Index, settings: Sequence[tuple[str, faiss.SearchParameters]]) -> Curve:
        points, labels = [], []
        for label, parameters in settings:
            scores, _ = index.search(queries, depth, params=parameters)
            recall = 100 * float((scores >= bar).mean())
            points.append((_queries_per_second(index, queries, depth, parameters), recall))
            labels.append(label)
        speed = f"queries/s, {len(documents):,} documents"
        return Curve(INDEXES, data.name, system, line, speed, f"recall@{DEPTH}", points, labels)

    graph = faiss.IndexHNSWFlat(documents.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    graph.add(documents)
    lists = _inverted_file(documents)
    walks = [(f"{ef}", faiss.SearchParametersHNSW(efSearch=ef)) for ef in EF_SEARCH]  # type: ignore[attr-defined]
    counts = [count for count in PROBES if count <= lists.nlist]
    probes = [(f"{count}", faiss.SearchParametersIVF(nprobe=count)) for count in counts]  # type: ignore[call-arg]
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        exact = curve(FLAT, flat, [("", faiss.SearchParameters())])
        return [exact, curve(HNSW, graph, walks), curve(IVF, lists, probes)]
    finally:
        faiss.omp_set_num_threads(threads)


def similarities(data: RetrievalSet, system: str, queries: Embeddings, documents: Embeddings) -> list[Curve]:
    """Returns the distribution of cosines for three kinds of (query, document), as the share of each bin.

    The documents answer the query, are the best-ranked one not known to answer it, or are drawn at random.
    """
    generator = np.random.default_rng(SEED)
    found: dict[str, list[float]] = {POSITIVES: [], HARD_NEGATIVES: [], RANDOM_NEGATIVES: []}
    for grades, scores in zip(data.grades(), score_rows(queries, documents), strict=True):
        answers = [row for row, grade in grades.items() if grade > 0]
        others = np.setdiff1d(generator.integers(0, len(documents), RANDOM_PER_QUERY), answers)
        found[POSITIVES] += scores[answers].tolist()
        found[RANDOM_NEGATIVES] += scores[others].tolist()
        if len(answers) < len(documents):
            scores[answers] = -np.inf
            found[HARD_NEGATIVES].append(float(scores.max()))
    return [_histogram(data.name, system, line, values) for line, values in found.items() if values]


def _histogram(set_name: str, system: str, line: str, cosines: Sequence[float]) -> Curve:
    """Shares of bins of one width, by their middles, from the empty one before the lowest cosine to that after the
    highest."""
    bins = np.floor(np.asarray(cosines) / BIN_WIDTH).astype(int)
    lowest = int(bins.min()) - 1
    shares = 100 * np.append(np.bincount(bins - lowest), 0) / len(bins)
    middles = (lowest + np.arange(len(shares)) + 0.5) * BIN_WIDTH
    points = list(zip(middles.round(6).tolist(), shares.tolist(), strict=True))
    return Curve(SIMILARITIES, set_name, system, line, "cosine", "share", points)


def _inverted_file(documents: Embeddings) -> faiss.IndexIVFFlat:
    """About four times as many lists as the root of the documents, the usual rule, but no list too short to train."""
    count, dim = documents.shape
    lists = max(1, min(round(4 * count**0.5), count // IVF_LIST_DOCUMENTS))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = IVF_ITERATIONS
    index.train(documents)
    index.add(documents)
    return index


def _queries_per_second(
    index: faiss.Index, queries: Embeddings, depth: int, parameters: faiss.SearchParameters
) -> float:
    """Measures by the thread's CPU clock, so that other work on the core does not count."""
    began = time.thread_time()
    answered, seconds = 0, 0.0
    while seconds < TIMED_SECONDS:
        row = answered % len(queries)
        index.search(queries[row : row + 1], depth, params=parameters)
        answered += 1
        seconds = time.thread_time() - began
    return answered / seconds

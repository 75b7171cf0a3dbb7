"""Asks a finished snapshot as the service would by default, hybrid and without filters, before anybody else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from indexer.encode import Encoder
from indexer.errors import BadQueries
from indexer.store.snapshot import Snapshot
from models.fusion import CANDIDATES, Fusion, fuse
from models.lexical import Ranking
from models.spec import Side

TOP = 10


def load_queries(path: Path) -> list[str]:
    """The queries of a file of JSON lines, one {"text": …} a line, as evaluation sets and the load test have them."""
    try:
        lines = path.read_bytes().splitlines()
        queries = [str(orjson.loads(line)["text"]) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadQueries(f'{path} is not a file of queries ({error!r}); write one {{"text": …}} a line') from error
    if not queries:
        raise BadQueries(f"{path} holds no query")
    return queries


def top_documents(snapshot: Snapshot, encoder: Encoder, queries: Sequence[str], k: int = TOP) -> list[list[str]]:
    """The ids of the `k` best documents of each query, best first; `encoder` reads queries."""
    per_document = -(-len(snapshot.passages) // len(snapshot.documents))
    depth = min(len(snapshot.passages), max(CANDIDATES, k) * per_document)
    scores, rows = snapshot.vectors.search(encoder.encode(queries, Side.QUERY), depth)
    answers = []
    for query, its_scores, its_rows in zip(queries, scores, rows, strict=True):
        dense = _documents(snapshot, (its_rows[its_rows >= 0], its_scores[its_rows >= 0]))
        lexical = _documents(snapshot, snapshot.lexical.search(query, depth))
        best, _ = fuse(dense, lexical, Fusion.SCORES)
        answers.append([snapshot.documents.get(row).id for row in best[:k].tolist()])
    return answers


def _documents(snapshot: Snapshot, passages: Ranking) -> Ranking:
    """A ranking of passages as one of documents: each is as good as its best passage."""
    rows, scores = passages
    documents = snapshot.passages.documents[rows].astype(np.int64)
    _, first = np.unique(documents, return_index=True)
    first = np.sort(first)[:CANDIDATES]
    return documents[first], scores[first]

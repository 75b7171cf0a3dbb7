"""Asks a finished snapshot as the service does by default: hybrid, without filters, fresh documents included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from indexer.encode import Encoder
from indexer.store.canaries import TOP
from indexer.store.errors import BadQueries
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot
from indexer.store.vectors import Rows, Scores
from models.encoder.spec import Side
from models.fusion import CANDIDATES, LATER_DENSE, LATER_LEXICAL, Fusion, best_passages, fuse
from models.lexical import Ranking

# The least score of a text that shares a word with the query.
SOME_WORD = float(np.nextafter(np.float32(0), np.float32(1)))


class VectorSearch(Protocol):
    """A snapshot's own index, or the database that holds its vectors."""

    def search(self, queries: Scores, k: int) -> tuple[Scores, Rows]: ...


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


def top_documents(
    snapshot: Snapshot,
    encoder: Encoder,
    queries: Sequence[str],
    k: int = TOP,
    *,
    vectors: VectorSearch | None = None,
    overlay: Overlay | None = None,
) -> list[list[str]]:
    """The ids of the `k` best documents of each query, best first; `encoder` reads queries.

    `vectors` searches in place of the snapshot's own index, `overlay` is what was posted and deleted since.
    """
    overlay = overlay or Overlay.over(snapshot)
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
        best, _ = fuse(dense, lexical, Fusion.SCORES)
        answers.append([overlay.document(row).id for row in best[:k].tolist()])
    return answers


def _documents(overlay: Overlay, main: Ranking, fresh: Ranking, later: float) -> Ranking:
    """Two rankings of passages, the snapshot's and the fresh ones, as one of documents by their best passages."""
    main = overlay.visible(*main)
    rows, scores = np.concatenate([main[0], fresh[0]]), np.concatenate([main[1], fresh[1]])
    documents, _, best = best_passages(rows, scores, overlay.documents_of, later)
    return documents[:CANDIDATES], best[:CANDIDATES]

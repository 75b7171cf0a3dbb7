"""Ranking of documents from the passages that each search found: plain functions of a serving and arrays.

A document scores as its best passage. The local engine and the remote client share this code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from indexer.store.arrays import Rows, Scores
from indexer.store.overlay import SOME_WORD
from models.fusion import CANDIDATES, LATER_LEXICAL, Mode, best_passages, fuse
from models.lexical import Ranking
from service.engine.jobs import Evidence, Found, Options, SearchJob
from service.serving.serving import Serving

# Factor of the next search's depth if the passages found belong to too few documents.
WIDEN = 4
# Passages beyond those that hold the wanted documents: first passages that may rank before a later one.
SPARE_PASSAGES = 20


class Side(NamedTuple):
    """The best documents of the dense or the lexical search, and the passages that they were chosen from."""

    best: Found
    passages: Ranking


_NO_ROWS, _NO_SCORES = np.empty(0, np.int64), np.empty(0, np.float32)
NOTHING = Side(Found(_NO_ROWS, _NO_ROWS, _NO_SCORES), (_NO_ROWS, _NO_SCORES))


def rank(options: Options, dense: Side, lexical: Side) -> Found:
    """Ranks at most top_k documents of one job; a side that the mode does not use is NOTHING."""
    if options.mode is Mode.HYBRID:
        found = _fuse(options, dense.best, lexical.best)
    else:
        found = dense.best if options.mode is Mode.DENSE else lexical.best
    return replace(found, evidence=Evidence(dense.passages, lexical.passages)) if options.evidence else found


def search_lexical(serving: Serving, job: SearchJob) -> Side:
    """Searches by words; NOTHING if the job's mode is dense."""
    options = job.options
    if options.mode is Mode.DENSE:
        return NOTHING
    allowed = serving.allowed(options.filters) if options.filters else None
    k = first_k(serving, documents_wanted(options))
    found = None
    while found is None:
        rows, scores = serving.snapshot.lexical.search(job.query, k, allowed)
        found = rank_passages(serving, options, rows, scores, k, LATER_LEXICAL)
        k = widen(serving, k)
    if serving.fresh is None:
        return found
    words = serving.fresh.score_words(job.query)
    return join_fresh(serving, options, found, words, LATER_LEXICAL, SOME_WORD)


def documents_wanted(options: Options) -> int:
    """Documents that one side must find: fusion looks deeper than the answer."""
    return max(CANDIDATES, options.top_k) if options.mode is Mode.HYBRID else options.top_k


def first_k(serving: Serving, documents: int) -> int:
    """Passages to search for first: enough for this many documents if passages are spread evenly."""
    passages = len(serving.snapshot.passages)
    per_document = -(-passages // len(serving.snapshot.documents))
    return min(passages, documents * per_document + (SPARE_PASSAGES if per_document > 1 else 0))


def widen(serving: Serving, k: int) -> int:
    """Passages to search for after `k` held too few documents."""
    return min(len(serving.snapshot.passages), k * WIDEN)


def rank_passages(serving: Serving, options: Options, rows: Rows, scores: Scores, k: int, later: float) -> Side | None:
    """Groups what a search of the snapshot for `k` passages found; None if a deeper search may find more documents.

    Rows of −1 are empty places. Passages that were replaced or deleted since the build are left out.
    """
    present = rows >= 0
    rows, scores = rows[present], scores[present]
    is_full = len(rows) == k < len(serving.snapshot.passages)
    if serving.fresh is not None:
        rows, scores = serving.fresh.visible(rows, scores)
    wanted = documents_wanted(options)
    side = group(serving, rows, scores, wanted, later)
    return None if is_full and len(side.best.documents) < wanted else side


def join_fresh(
    serving: Serving, options: Options, main: Side, scores: Scores, later: float, least: float = -np.inf
) -> Side:
    """Adds the fresh passages with these `scores` to a side; those below `least` were not found."""
    if serving.fresh is None:
        return main
    wanted = documents_wanted(options)
    # If the snapshot gave as many documents as wanted, no score below the last one can be among the best.
    bar = float(main.best.scores[-1]) if len(main.best.documents) >= wanted else least
    rows, own = serving.fresh.pick(scores, options.filters, max(bar, least))
    if not len(rows):
        return main
    rows, own = np.concatenate([main.passages[0], rows]), np.concatenate([main.passages[1], own])
    order = np.lexsort((rows, -own))
    return group(serving, rows[order], own[order], wanted, later)


def group(serving: Serving, passages: Rows, scores: Scores, limit: int, later: float) -> Side:
    """Keeps the best passage of each document, best first; one that is not the first counts `later` of its score."""
    documents, rows, best = best_passages(passages, scores, serving.overlay.documents_of, later)
    return Side(Found(documents[:limit], rows[:limit], best[:limit]), (passages, scores))


def _fuse(options: Options, dense: Found, lexical: Found) -> Found:
    documents, scores = fuse(
        (dense.documents, dense.scores),
        (lexical.documents, lexical.scores),
        options.fusion,
        options.weight,
        options.trust,
    )
    # By words a document is found as a whole, so the passage is that of the embeddings if they found it.
    passages = dict(zip(lexical.documents.tolist(), lexical.passages.tolist(), strict=True))
    passages.update(zip(dense.documents.tolist(), dense.passages.tolist(), strict=True))
    best = documents[: options.top_k]
    rows = np.array([passages[row] for row in best.tolist()], dtype=np.int64)
    return Found(best, rows, scores[: options.top_k])

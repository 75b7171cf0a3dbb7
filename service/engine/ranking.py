"""From the passages that each side found to the ranking of one job: plain functions of a serving and arrays.

Rows of passages become rows of documents here: a document is as good as its best passage. Whoever searched the vectors,
in this process or another, the rest is the same code. Knows nothing of queues, encoders or texts of documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.fusion import CANDIDATES, LATER_LEXICAL, best_passages, fuse
from models.lexical import Ranking
from service.engine.protocol import Evidence, Found, Mode, Options, SearchJob
from service.serving.serving import Mask, Serving

# How much further a search looks when the passages it found belong to too few documents.
WIDEN = 4
# Passages beyond those that hold the wanted documents: first passages that may rank before a later one.
SPARE_PASSAGES = 20
# The least score of a text that shares a word with the query.
SOME_WORD = float(np.nextafter(np.float32(0), np.float32(1)))

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]


class Side(NamedTuple):
    """What one side found: its best documents, and the passages that they were chosen from."""

    best: Found
    passages: Ranking


def rank(options: Options, dense: Side, lexical: Side) -> Found:
    """The final ranking of one job, of at most top_k documents; a side that the mode does not ask is NOTHING."""
    if options.mode is Mode.HYBRID:
        found = _fuse(options, dense.best, lexical.best)
    else:
        found = dense.best if options.mode is Mode.DENSE else lexical.best
    return replace(found, evidence=Evidence(dense.passages, lexical.passages)) if options.evidence else found


def search_lexical(serving: Serving, job: SearchJob) -> Side:
    """The lexical side of a job; NOTHING where its mode is dense."""
    if job.options.mode is Mode.DENSE:
        return NOTHING
    wanted, allowed = documents_wanted(job.options), allowed_rows(serving, job.options)
    k = first_k(serving, wanted)
    while True:
        rows, scores = serving.snapshot.lexical.search(job.query, k, allowed)
        found = take_main(serving, rows, scores, wanted, LATER_LEXICAL)
        if not is_short(serving, found, wanted, len(rows), k):
            break
        k = widen(serving, k)
    if serving.fresh is None:
        return found
    words = serving.fresh.score_words(job.query)
    return join_fresh(serving, job.options, found, words, LATER_LEXICAL, SOME_WORD)


def documents_wanted(options: Options) -> int:
    """Documents that one side must find: fusion looks deeper than the answer."""
    return max(CANDIDATES, options.top_k) if options.mode is Mode.HYBRID else options.top_k


def allowed_rows(serving: Serving, options: Options) -> Mask | None:
    return serving.allowed(options.filters) if options.filters else None


def first_k(serving: Serving, documents: int) -> int:
    """Passages that hold this many documents if they are spread evenly, and some more that `group` may prefer."""
    passages = len(serving.snapshot.passages)
    per_document = -(-passages // len(serving.snapshot.documents))
    return min(passages, documents * per_document + (SPARE_PASSAGES if per_document > 1 else 0))


def is_short(serving: Serving, found: Side, wanted: int, passages: int, k: int) -> bool:
    """Whether the `passages` that a search for `k` gave hold too few documents, though there are more passages."""
    return len(found.best.documents) < wanted and passages == k < len(serving.snapshot.passages)


def widen(serving: Serving, k: int) -> int:
    """How many passages to look for after `k` held too few documents."""
    return min(len(serving.snapshot.passages), k * WIDEN)


def take_main(serving: Serving, passages: Rows, scores: Scores, limit: int, later: float) -> Side:
    """What a search of the snapshot found, less what is replaced or deleted since; `later` as for `group`."""
    if serving.fresh is not None:
        passages, scores = serving.fresh.visible(passages, scores)
    return group(serving, passages, scores, limit, later)


def join_fresh(
    serving: Serving, options: Options, main: Side, scores: Scores, later: float, least: float = -np.inf
) -> Side:
    """A side with the fresh passages, whose `scores` these are, in their places; below `least` one was not found."""
    if serving.fresh is None:
        return main
    wanted = documents_wanted(options)
    # Where the snapshot gave as many documents as are wanted, what scores less than the last cannot be among the best.
    bar = float(main.best.scores[-1]) if len(main.best.documents) >= wanted else least
    rows, own = serving.fresh.pick(scores, options.filters, max(bar, least))
    if not len(rows):
        return main
    rows, own = np.concatenate([main.passages[0], rows]), np.concatenate([main.passages[1], own])
    order = np.lexsort((rows, -own))
    return group(serving, rows[order], own[order], wanted, later)


def group(serving: Serving, passages: Rows, scores: Scores, limit: int, later: float) -> Side:
    """The best passage of each document, best first; one that is not the first counts `later` of its score."""
    documents, rows, best = best_passages(passages, scores, serving.documents_of, later)
    return Side(Found(documents[:limit], rows[:limit], best[:limit]), (passages, scores))


def _fuse(options: Options, dense: Found, lexical: Found) -> Found:
    documents, scores = fuse(
        (dense.documents, dense.scores), (lexical.documents, lexical.scores), options.fusion, options.weight
    )
    # Where both sides found the document, the words' passage is shown: it has something to mark.
    passages = dict(zip(dense.documents.tolist(), dense.passages.tolist(), strict=True))
    passages.update(zip(lexical.documents.tolist(), lexical.passages.tolist(), strict=True))
    best = documents[: options.top_k]
    rows = np.array([passages[row] for row in best.tolist()], dtype=np.int64)
    return Found(best, rows, scores[: options.top_k])


_NO_ROWS, _NO_SCORES = np.empty(0, np.int64), np.empty(0, np.float32)
NOTHING = Side(Found(_NO_ROWS, _NO_ROWS, _NO_SCORES), (_NO_ROWS, _NO_SCORES))

"""Finds what a ranking is based on: the placings of documents on each side, and their passages with scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.fusion import LATER_DENSE, LATER_LEXICAL, Fusion, Mode, fuse, query_weight
from models.lexical import Postings, Ranking
from service.engine.jobs import Evidence, Found, Options
from service.engine.ranking import documents_wanted, group
from service.serving.serving import Serving

Placing = tuple[int, float]
"""Rank, from 1, and score."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a ranking is based on, by document row: its placing on each side, and its passages, best first.

    `weight` is the dense side's share in a fusion by scores.
    """

    dense: Mapping[int, Placing]
    lexical: Mapping[int, Placing]
    passages: Mapping[int, list[tuple[int, float]]]
    weight: float | None


def divide_words(serving: Serving, lexical: Ranking, documents: Sequence[int], query: str) -> Ranking:
    """Assigns each document's lexical score to its best passage, and to the others in proportion.

    `lexical` has one row for a document that was found as a whole; a snapshot before format 6 has its passages.
    """
    index = serving.snapshot.lexical
    weights = index.weights(query)
    rows, scores = (part.tolist() for part in lexical)
    owners = serving.overlay.documents_of(lexical[0]).tolist()
    found = Counter(owners)  # many, if many documents were posted since the build
    places = {owner: place for place, owner in enumerate(owners) if found[owner] == 1}
    for document in documents:
        if (place := places.get(document)) is None or len(passages := serving.overlay.passages_of(document)) < 2:
            continue
        own = Postings.of(passage_texts(serving, document, passages), weights).score(weights, index)
        shares = (own * (scores[place] / own.max())).tolist() if own.any() else [scores[place]]
        rows[place], scores[place] = passages[int(own.argmax())], max(shares)
        others = [(row, share) for row, share in zip(passages, shares, strict=False) if share and row != rows[place]]
        rows += [row for row, _ in others]
        scores += [share for _, share in others]
    order = np.lexsort((rows, [-score for score in scores]))
    return np.array(rows, np.int64)[order], np.array(scores, np.float32)[order]


def account_for(serving: Serving, options: Options, evidence: Evidence, words: Ranking) -> Account:
    """Repeats the engine's ranking on the rows that it found, and keeps its intermediate steps.

    `words` are the passages that the words found.
    """
    wanted = documents_wanted(options)
    dense = group(serving, *evidence.dense, wanted, LATER_DENSE).best
    lexical = group(serving, *evidence.lexical, wanted, LATER_LEXICAL).best
    weight = None
    rows, scores = evidence.dense if options.mode is Mode.DENSE else words
    if options.mode is Mode.HYBRID:
        if options.fusion is Fusion.SCORES:
            own = query_weight(dense.scores, lexical.scores, options.trust)
            weight = own if options.weight is None else options.weight
        rows, scores = fuse(evidence.dense, words, options.fusion, weight)
    passages: dict[int, list[tuple[int, float]]] = {}
    documents = serving.overlay.documents_of(rows).tolist()
    for document, row, score in zip(documents, rows.tolist(), scores.tolist(), strict=True):
        passages.setdefault(document, []).append((row, score))
    return Account(_placings(dense), _placings(lexical), passages, weight)


def _placings(side: Found) -> dict[int, Placing]:
    scored = zip(side.documents.tolist(), side.scores.tolist(), strict=True)
    return {document: (rank, score) for rank, (document, score) in enumerate(scored, start=1)}


def passage_texts(serving: Serving, document: int, passages: Sequence[int]) -> list[str]:
    """Returns what a reranker reads of a document's passages: the title and the passage. Parses the document once."""
    stored = serving.overlay.document(document)
    begin, text = f"{stored.title}\n" if stored.title else "", stored.text
    return [begin + text[slice(*serving.overlay.span(row))] for row in passages]

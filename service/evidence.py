"""What stands behind a ranking: where each side placed a document, and which of its passages were found.

Reads the rows that the engine hands over; knows nothing of texts or JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.fusion import LATER_DENSE, LATER_LEXICAL, Fusion, fuse, query_weight
from models.lexical import Ranking
from service.engine.jobs import Evidence, Found, Mode, Options
from service.engine.ranking import documents_wanted, group
from service.serving import Serving

Placing = tuple[int, float]
"""Rank, from 1, and score."""


@dataclass(frozen=True, slots=True)
class Account:
    """By document row: its placing on each side, and its passages with their scores, best first.

    `weight` is the dense side's share where a fusion by scores was made.
    """

    dense: Mapping[int, Placing]
    lexical: Mapping[int, Placing]
    passages: Mapping[int, list[tuple[int, float]]]
    weight: float | None


def account_for(serving: Serving, options: Options, evidence: Evidence) -> Account:
    """Repeats, on the rows that were found, what the engine made of them."""
    wanted = documents_wanted(options)
    dense = group(serving, *evidence.dense, wanted, LATER_DENSE).best
    lexical = group(serving, *evidence.lexical, wanted, LATER_LEXICAL).best
    weight = None
    if options.mode is Mode.HYBRID and options.fusion is Fusion.SCORES:
        weight = query_weight(dense.scores, lexical.scores) if options.weight is None else options.weight
    ranked = _rank_passages(options, evidence, weight)
    return Account(_placings(dense), _placings(lexical), _by_document(serving, ranked), weight)


def _rank_passages(options: Options, evidence: Evidence, weight: float | None) -> Ranking:
    """Passages in the order of the mode: fused as documents are, with the weight that the documents got."""
    if options.mode is Mode.HYBRID:
        return fuse(evidence.dense, evidence.lexical, options.fusion, weight)
    return evidence.dense if options.mode is Mode.DENSE else evidence.lexical


def _placings(side: Found) -> dict[int, Placing]:
    scored = zip(side.documents.tolist(), side.scores.tolist(), strict=True)
    return {document: (rank, score) for rank, (document, score) in enumerate(scored, start=1)}


def _by_document(serving: Serving, ranking: Ranking) -> dict[int, list[tuple[int, float]]]:
    rows, scores = ranking
    documents = serving.documents_of(rows).tolist()
    found: dict[int, list[tuple[int, float]]] = {}
    for document, row, score in zip(documents, rows.tolist(), scores.tolist(), strict=True):
        found.setdefault(document, []).append((row, score))
    return found

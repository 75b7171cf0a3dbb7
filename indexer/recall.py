"""How much of the exact answer an index finds, and how far it must be searched to find enough.

Queries come from a file or are made of the documents themselves. Knows nothing of publishing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from indexer.encode import Encoder
from indexer.errors import BadBuild
from indexer.passages import SENTENCE_ENDS
from indexer.store.arrays import Array
from indexer.store.documents import Documents, StoredDocument
from indexer.store.kinds import IndexKind
from indexer.store.manifest import Recall
from indexer.store.vectors import Rows
from models.correction import sample_rows
from models.encoder.onnx import Vectors
from models.encoder.spec import Side

FLOOR = 0.95
QUERIES = 200
K = 10
LONGEST_QUERY = 64
# Two ways to the same sum may differ in their last digits; rows that tie with the tenth count as found.
TIE = 1e-5
_END = re.compile(f"[{re.escape(''.join(SENTENCE_ENDS))}]|\\. ")


class Searched(Protocol):
    """An index over `values` (passages, dim) that can be searched so far, and exactly."""

    @property
    def kind(self) -> IndexKind: ...

    @property
    def values(self) -> Array: ...

    def search(self, queries: Vectors, k: int, *, depth: int | None) -> tuple[Vectors, Rows]: ...

    def search_exactly(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]: ...


def sample_queries(documents: Documents, count: int = QUERIES) -> list[str]:
    """What somebody might type who looks for one of the documents: titles or first sentences, at equal distances."""
    return [_query_for(documents.get(row)) for row in sample_rows(len(documents), count).tolist()]


def encode_queries(encoder: Encoder, queries: Sequence[str]) -> Vectors:
    """By the encoder's query side; by its document side if the encoder reads documents only."""
    return encoder.encode(queries, Side.QUERY if Side.QUERY in encoder.spec.sides else Side.DOCUMENT)


def measure_recall(index: Searched, queries: Vectors, depth: int) -> float:
    """The average share of the ten best rows that the index finds when it searches so far."""
    k = min(K, len(index.values))
    exact, _ = index.search_exactly(queries, k)
    found, _ = index.search(queries, k, depth=depth)
    return float((found >= exact[:, -1:] - TIE).mean())


def choose_depth(index: Searched, queries: Vectors, floor: float) -> tuple[int, Recall]:
    """The least depth whose recall reaches the floor; raises BadBuild where even the greatest does not."""
    recall = 0.0
    for depth in index.kind.depths(len(index.values)):
        recall = measure_recall(index, queries, depth)
        if recall >= floor:
            return depth, Recall(at_10=round(recall, 4), queries=len(queries), floor=floor)
    raise BadBuild(
        f"the {index.kind} index finds {recall:.3f} of the exact ten best passages, the floor is {floor:g}: choose "
        "another kind (care index suggest) or a lower --recall-floor"
    )


def _query_for(document: StoredDocument) -> str:
    text = document.title.strip() or document.text.strip()
    return _END.split(text, maxsplit=1)[0][:LONGEST_QUERY] or text[:LONGEST_QUERY]

"""Kinds of vector index and their files, without importing FAISS.

`vectors.npy` is the only copy of the vectors; `index.faiss` holds what a kind adds, links or short codes.
"""

from __future__ import annotations

from enum import StrEnum

VECTORS_FILE = "vectors.npy"
INDEX_FILE = "index.faiss"

# Exact search over this many passages takes a few milliseconds on one core; beyond it a graph is worth building.
FLAT_PASSAGES = 20_000
HNSW_LINKS = 32
HNSW_EF_CONSTRUCTION = 200
# Lists of an inverted file: about four times the square root of the rows.
LISTS_PER_ROOT = 4
FEWEST_ROWS_PER_LIST = 39  # FAISS warns below this
# Fewer rows than this cannot train the codes of a list index.
LEAST_ROWS_FOR_LISTS = 1000


class IndexKind(StrEnum):
    """Exact search, a graph (cagra: built on a GPU), or an inverted file with short codes and exact rescoring."""

    FLAT = "flat"
    HNSW = "hnsw"
    CAGRA = "cagra"
    IVF_PQ = "ivf-pq"
    RABITQ = "rabitq"

    @property
    def is_graph(self) -> bool:
        return self in (IndexKind.HNSW, IndexKind.CAGRA)

    @property
    def has_lists(self) -> bool:
        return self in (IndexKind.IVF_PQ, IndexKind.RABITQ)

    def depths(self, rows: int) -> list[int]:
        """Search depths to choose from, ascending: nodes of the graph, or lists; [0] if there is no choice."""
        if self is IndexKind.FLAT:
            return [0]
        if self.is_graph:
            return [64, 128, 256, 512]
        lists = list_count(rows)
        return [min(depth, lists) for depth in (16, 32, 64, 128, 256) if depth < 2 * lists] or [lists]


def list_count(rows: int) -> int:
    """Returns how many lists an inverted file over this many rows has."""
    return max(1, min(LISTS_PER_ROOT * int(rows**0.5), rows // FEWEST_ROWS_PER_LIST))

"""BM25 over token bigrams as a teacher: it adds what an encoder lacks, matching of rare words.

It is computed on the training device: bigrams are hashed into buckets, so that BM25 of a whole batch is one matrix
product.
"""

from __future__ import annotations

import numpy as np
import torch

from models.training.tables import Padded, TokenTable

BUCKETS = 1 << 17
K1, B = 1.2, 0.75


def bigram_counts(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How often each text holds each bucket of neighbouring tokens, (texts, BUCKETS).

    The first and the last token of a text are markers, not text: bigrams with either do not count.
    """
    buckets = (ids[:, :-1] * 1_000_003 + ids[:, 1:]) % BUCKETS
    inner = mask.clone()
    inner[:, 0] = 0
    inner[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1] = 0
    counts = torch.zeros(len(ids), BUCKETS, device=ids.device)
    return counts.scatter_add_(1, buckets, (inner[:, :-1] * inner[:, 1:]).float())


class LexicalTeacher:
    """BM25 of queries against the documents of one batch."""

    def __init__(self, idf: torch.Tensor, mean_length: float) -> None:
        self._idf = idf
        self._mean_length = mean_length

    @classmethod
    def fit(cls, documents: TokenTable, sample: int = 20_000, seed: int = 0) -> LexicalTeacher:
        """Document frequencies from a sample of the training documents."""
        rows = np.random.default_rng(seed).permutation(len(documents))[:sample]
        frequency = torch.zeros(BUCKETS, device=documents.device)
        lengths = 0.0
        for part in np.array_split(rows, max(1, len(rows) // 256)):
            counts = bigram_counts(*documents.padded(part))
            frequency += (counts > 0).sum(0)
            lengths += float(counts.sum())
        total = len(rows)
        return cls(torch.log1p((total - frequency + 0.5) / (frequency + 0.5)), max(1.0, lengths / total))

    def scores(self, queries: Padded, documents: Padded) -> torch.Tensor:
        """(queries, documents), each row divided by its best."""
        counts = bigram_counts(*documents)
        length = counts.sum(1, keepdim=True)
        weights = self._idf * counts * (K1 + 1) / (counts + K1 * (1 - B + B * length / self._mean_length))
        scores = bigram_counts(*queries) @ weights.T
        return scores / scores.amax(1, keepdim=True).clamp_min(1e-6)


def stretch(scores: torch.Tensor) -> torch.Tensor:
    """Each row stretched to 0 … 1, as score fusion does at search time."""
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    return (scores - low) / (high - low).clamp_min(1e-6)

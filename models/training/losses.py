"""Losses of a contrast stage, BM25 as a teacher, and their weighted sum over a batch of vectors.

Rows are queries, columns documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.passes import Padded, TokenTable
from models.training.stages import Loss

BUCKETS = 1 << 17
K1, B = 1.2, 0.75
# A learned temperature stays above this: below it a batch is decided by rounding.
COLDEST = 0.005


def similarities(queries: Tensor, documents: Tensor, *, cosine: bool = True) -> Tensor:
    """Returns scores (queries, documents): cosines, or inner products of the vectors as they are."""
    if cosine:
        queries, documents = functional.normalize(queries, dim=-1), functional.normalize(documents, dim=-1)
    return queries @ documents.T


def info_nce(scores: Tensor, labels: Tensor, ignored: Tensor, temperature: float | Tensor) -> Tensor:
    """Cross-entropy of each query's own document among all; `ignored` (queries, documents) are not negatives.

    With the scores of two encoders this is Asym-InfoNCE: only the origin of the vectors differs.
    """
    return functional.cross_entropy((scores / temperature).masked_fill(ignored, float("-inf")), labels)


def symmetric_info_nce(scores: Tensor, labels: Tensor, ignored: Tensor, temperature: float | Tensor) -> Tensor:
    """Averages both directions; backwards, a positive searches the queries, and hard negatives search nothing."""
    back, own = scores[:, labels].T, torch.arange(len(labels), device=labels.device)
    there = info_nce(scores, labels, ignored, temperature)
    return (there + info_nce(back, own, ignored[:, labels].T, temperature)) / 2


def mse(students: Tensor, teachers: Tensor) -> Tensor:
    """Squared distance between normalised vectors (texts, dim), mean over the texts."""
    difference = functional.normalize(students, dim=-1) - functional.normalize(teachers, dim=-1)
    return difference.square().sum(dim=-1).mean()


def distillation(
    scores: Tensor, teacher: Tensor, temperature: float | Tensor, teacher_temperature: float | Tensor
) -> Tensor:
    """Kullback–Leibler divergence of the student's rows from the teacher's, as distributions; mean over the rows."""
    student = functional.log_softmax(scores / temperature, dim=1)
    target = functional.log_softmax(teacher / teacher_temperature, dim=1)
    return functional.kl_div(student, target, reduction="batchmean", log_target=True)


def alignment(students: Tensor, teachers: Tensor, temperature: float | Tensor) -> Tensor:
    """KALE: Kullback–Leibler divergence of embeddings (texts, dim) taken as distributions over their dimensions.

    KALE takes the softmax of raw hidden states. Kept vectors of a teacher have unit length, so both sides are scaled to
    the length √dim, as after the last norm layer of a transformer. Without the scale the gradient would be about 2·dim
    times smaller than that of `mse`. The factor temperature² keeps the gradient's size at any temperature.
    """
    scale = students.shape[-1] ** 0.5
    student, target = (functional.normalize(vectors, dim=-1) * scale for vectors in (students, teachers))
    return distillation(student, target, temperature, temperature) * temperature**2


def matryoshka(dims: Sequence[int], loss_at: Callable[[int], Tensor]) -> Tensor:
    """Returns the mean of a loss over nested dimensions; `loss_at(m)` cuts vectors to m before it normalises them."""
    return torch.stack([loss_at(dim) for dim in dims]).mean()


def not_negatives(same: Tensor, labels: Tensor) -> Tensor:
    """Ignores the documents that answer a query by `same` (queries, documents), all but its label."""
    ignored = same.clone()
    ignored[torch.arange(len(labels), device=labels.device), labels] = False
    return ignored


def likely_positives(teacher: Tensor, labels: Tensor, margin: float) -> Tensor:
    """True where the teacher scores a document above the positive by more than the margin."""
    return not_negatives(teacher > teacher.gather(1, labels[:, None]) + margin, labels)


def reconstruction(states: Tensor, vocabulary: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
    """Sum over the chosen tokens of the cross-entropy of naming them.

    States (texts, tokens, width), vocabulary (words, width), the others (texts, tokens). A sum, so that a batch in
    chunks adds up to the batch in one; only chosen tokens are scored, for that is the largest tensor.
    """
    scores = functional.linear(states[chosen], vocabulary).float()
    return functional.cross_entropy(scores, targets[chosen], reduction="sum")


def bigram_counts(ids: Tensor, mask: Tensor) -> Tensor:
    """Returns how often each text holds each bucket of neighbouring tokens, (texts, BUCKETS).

    The first and the last token of a text are markers, not text: bigrams with either do not count.
    """
    buckets = (ids[:, :-1] * 1_000_003 + ids[:, 1:]) % BUCKETS
    inner = mask.clone()
    inner[:, 0] = 0
    inner[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1] = 0
    counts = torch.zeros(len(ids), BUCKETS, device=ids.device)
    return counts.scatter_add_(1, buckets, (inner[:, :-1] * inner[:, 1:]).float())


class LexicalTeacher:
    """BM25 over token bigrams, of queries against the documents of one batch: it matches rare words.

    Bigrams are hashed into buckets, so that BM25 of a whole batch is one matrix product on the training device.
    """

    def __init__(self, idf: Tensor, mean_length: float) -> None:
        self._idf, self._mean_length = idf, mean_length

    @classmethod
    def fit(cls, documents: TokenTable, sample: int = 20_000, seed: int = 0) -> LexicalTeacher:
        """Learns document frequencies from a sample of the training documents."""
        rows = np.random.default_rng(seed).permutation(len(documents))[:sample]
        frequency = torch.zeros(BUCKETS, device=documents.device)
        lengths = 0.0
        for part in np.array_split(rows, max(1, len(rows) // 256)):
            counts = bigram_counts(*documents.padded(part))
            frequency += (counts > 0).sum(0)
            lengths += float(counts.sum())
        idf = torch.log1p((len(rows) - frequency + 0.5) / (frequency + 0.5))
        return cls(idf, max(1.0, lengths / len(rows)))

    def scores(self, queries: Padded, documents: Padded) -> Tensor:
        """(queries, documents), each row divided by its best."""
        counts = bigram_counts(*documents)
        length = counts.sum(1, keepdim=True)
        weights = self._idf * counts * (K1 + 1) / (counts + K1 * (1 - B + B * length / self._mean_length))
        scores = bigram_counts(*queries) @ weights.T
        return scores / scores.amax(1, keepdim=True).clamp_min(1e-6)


def stretch(scores: Tensor) -> Tensor:
    """Returns each row stretched to 0 … 1, as score fusion does at search time."""
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    return (scores - low) / (high - low).clamp_min(1e-6)


@dataclass(frozen=True, slots=True)
class Contrasted:
    """A batch as vectors; query i is answered by document i, and `answers` says which others are not negatives.

    Shapes: queries (queries, at least dim), documents (documents, at least dim), hard negatives after the positives,
    targets (queries, dim), all others (queries, documents).
    """

    queries: Tensor
    documents: Tensor
    answers: Tensor
    others: Tensor | None = None
    """Hard negatives of other rows, if each row has its own alone."""
    targets: Tensor | None = None
    """The teacher's vectors of the queries."""
    teacher: Tensor | None = None
    """The teacher's scores."""
    lexical: Tensor | None = None
    """BM25, each row divided by its best."""


class Objective(nn.Module):
    """The weighted sum, at one dimension or averaged over nested ones; holds the temperature if that is learned."""

    def __init__(self, settings: Loss, dim: int) -> None:
        super().__init__()
        self._settings = settings
        self._dims = settings.dims or [dim]
        start = torch.tensor(math.log(settings.temperature))
        self.log_temperature = nn.Parameter(start) if settings.learnable else None

    @property
    def temperature(self) -> float | Tensor:
        if self.log_temperature is None:
            return self._settings.temperature
        with torch.no_grad():  # the weight itself: a clamped value would have no gradient, and never rise again
            self.log_temperature.clamp_(min=math.log(COLDEST))
        return self.log_temperature.exp()

    def forward(self, batch: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, and each term of it before its weight."""
        settings = self._settings
        labels = torch.arange(len(batch.queries), device=batch.queries.device)
        ignored = not_negatives(batch.answers, labels)
        if batch.others is not None:
            ignored = ignored | batch.others
        if settings.false_negative_margin is not None and batch.teacher is not None:
            ignored = ignored | likely_positives(batch.teacher, labels, settings.false_negative_margin)
        terms: dict[str, list[Tensor]] = {}

        def loss_at(dim: int) -> Tensor:
            found = self._terms(batch, dim, labels, ignored)
            for name, value in found.items():
                terms.setdefault(name, []).append(value)
            return torch.stack([getattr(settings, name) * value for name, value in found.items()]).sum()

        loss = matryoshka(self._dims, loss_at)
        return loss, {name: torch.stack(values).mean().detach() for name, values in terms.items()}

    def _terms(self, batch: Contrasted, dim: int, labels: Tensor, ignored: Tensor) -> dict[str, Tensor]:
        settings, temperature = self._settings, self.temperature
        queries, documents = batch.queries[:, :dim], batch.documents[:, :dim]
        scores = similarities(queries, documents, cosine=settings.similarity == "cosine")
        found: dict[str, Tensor] = {}
        if settings.info_nce > 0:
            contrast = symmetric_info_nce if settings.symmetric else info_nce
            found["info_nce"] = contrast(scores, labels, ignored, temperature)
        if settings.mse > 0 and batch.targets is not None:
            found["mse"] = mse(queries, batch.targets[:, :dim])
        if settings.align > 0 and batch.targets is not None:
            found["align"] = alignment(queries, batch.targets[:, :dim], temperature)
        if settings.distil > 0 and batch.teacher is not None:
            target, share = batch.teacher, settings.lexical_share
            if batch.lexical is not None:  # mixed with BM25 on a common scale of 0 … 1
                target = (1 - share) * stretch(target) + share * batch.lexical
            found["distil"] = distillation(scores, target, temperature, settings.teacher_temperature)
        return found


def with_hypothetical(queries: Tensor, hypothetical: Tensor, owners: Tensor) -> Tensor:
    """Averages each query's vector with those of its imagined documents, all normalised first (SL-HyDE, formula 8)."""
    total = functional.normalize(queries, dim=-1).index_add(0, owners, functional.normalize(hypothetical, dim=-1))
    return total / (torch.bincount(owners, minlength=len(queries)) + 1)[:, None]

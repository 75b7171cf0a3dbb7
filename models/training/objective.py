"""What a contrast stage minimises: the sum of a recipe's terms over the vectors of one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training import losses
from models.training.lexical import stretch
from models.training.recipe import Loss

COLDEST = 0.005
"""A learned temperature stays above this: below it a batch is decided by rounding."""


@dataclass(frozen=True, slots=True)
class Contrasted:
    """A batch as vectors; query i is answered by document i, and `answers` says which others are no negatives."""

    queries: Tensor
    """(queries, at least dim)."""
    documents: Tensor
    """(documents, at least dim), hard negatives after the positives."""
    answers: Tensor
    """(queries, documents)."""
    others: Tensor | None = None
    """(queries, documents): hard negatives of other rows, if each row has its own alone."""
    targets: Tensor | None = None
    """(queries, dim): the teacher's reading of the queries."""
    teacher: Tensor | None = None
    """(queries, documents): the teacher's scores."""
    lexical: Tensor | None = None
    """(queries, documents): BM25, each row divided by its best."""


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
        return self.log_temperature.exp().clamp_min(COLDEST)

    def forward(self, batch: Contrasted) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and each term of it before its weight."""
        labels = torch.arange(len(batch.queries), device=batch.queries.device)
        ignored = losses.not_negatives(batch.answers, labels)
        if batch.others is not None:
            ignored = ignored | batch.others
        if self._settings.false_negative_margin is not None and batch.teacher is not None:
            margin = self._settings.false_negative_margin
            ignored = ignored | losses.likely_positives(batch.teacher, labels, margin)
        terms: dict[str, list[Tensor]] = {}

        def loss_at(dim: int) -> Tensor:
            found = self._terms(batch, dim, labels, ignored)
            for name, value in found.items():
                terms.setdefault(name, []).append(value)
            return torch.stack([getattr(self._settings, name) * value for name, value in found.items()]).sum()

        loss = losses.matryoshka(self._dims, loss_at)
        return loss, {name: torch.stack(values).mean().detach() for name, values in terms.items()}

    def _terms(self, batch: Contrasted, dim: int, labels: Tensor, ignored: Tensor) -> dict[str, Tensor]:
        settings, temperature = self._settings, self.temperature
        queries, documents = batch.queries[:, :dim], batch.documents[:, :dim]
        scores = losses.similarities(queries, documents, cosine=settings.similarity == "cosine")
        found: dict[str, Tensor] = {}
        if settings.info_nce > 0:
            contrast = losses.symmetric_info_nce if settings.symmetric else losses.info_nce
            found["info_nce"] = contrast(scores, labels, ignored, temperature)
        if settings.mse > 0 and batch.targets is not None:
            found["mse"] = losses.mse(queries, batch.targets[:, :dim])
        if settings.align > 0 and batch.targets is not None:
            found["align"] = losses.alignment(queries, batch.targets[:, :dim], temperature)
        if settings.distil > 0 and batch.teacher is not None:
            target = self._blended(batch.teacher, batch.lexical)
            found["distil"] = losses.distillation(scores, target, temperature, settings.teacher_temperature)
        return found

    def _blended(self, teacher: Tensor, lexical: Tensor | None) -> Tensor:
        """The teacher's scores, mixed with BM25 on a common scale of 0 … 1 if the recipe wants that."""
        if lexical is None:
            return teacher
        share = self._settings.lexical_share
        return (1 - share) * stretch(teacher) + share * lexical


def with_hypothetical(queries: Tensor, hypothetical: Tensor, owners: Tensor) -> Tensor:
    """Each query's vector averaged with those of its imagined documents, all normalised first (SL-HyDE, formula 8)."""
    total = functional.normalize(queries, dim=-1).index_add(0, owners, functional.normalize(hypothetical, dim=-1))
    counts = torch.bincount(owners, minlength=len(queries)) + 1
    return total / counts[:, None]

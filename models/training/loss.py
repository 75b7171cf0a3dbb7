"""Losses as pure functions of score matrices. Rows are queries, columns documents; knows no encoder."""

from __future__ import annotations

import torch
from torch.nn import functional


def info_nce(scores: torch.Tensor, labels: torch.Tensor, ignored: torch.Tensor, temperature: float) -> torch.Tensor:
    """Cross-entropy of each query's own document among all; `ignored` (queries, documents) are not negatives."""
    logits = (scores / temperature).masked_fill(ignored, float("-inf"))
    return functional.cross_entropy(logits, labels)


def distillation(
    scores: torch.Tensor, teacher: torch.Tensor, temperature: float, teacher_temperature: float
) -> torch.Tensor:
    """Kullback–Leibler divergence of the student's ranking of the batch from the teacher's."""
    student = functional.log_softmax(scores / temperature, dim=1)
    target = functional.log_softmax(teacher / teacher_temperature, dim=1)
    return functional.kl_div(student, target, reduction="batchmean", log_target=True)


def not_negatives(positives: torch.Tensor, documents: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """True where a column holds the same document as the row's positive without being the label itself."""
    same = positives[:, None] == documents[None, :]
    same[torch.arange(len(labels), device=labels.device), labels] = False
    return same

"""Losses as pure functions of tensors. Rows are queries, columns documents. Knows no encoder and no recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional


def similarities(queries: Tensor, documents: Tensor, *, cosine: bool = True) -> Tensor:
    """Scores (queries, documents): cosines, or inner products of the vectors as they are."""
    if cosine:
        queries, documents = functional.normalize(queries, dim=-1), functional.normalize(documents, dim=-1)
    return queries @ documents.T


def info_nce(scores: Tensor, labels: Tensor, ignored: Tensor, temperature: float | Tensor) -> Tensor:
    """Cross-entropy of each query's own document among all; `ignored` (queries, documents) are not negatives.

    With the scores of two encoders this is Asym-InfoNCE: only the origin of the vectors differs.
    """
    logits = (scores / temperature).masked_fill(ignored, float("-inf"))
    return functional.cross_entropy(logits, labels)


def symmetric_info_nce(scores: Tensor, labels: Tensor, ignored: Tensor, temperature: float | Tensor) -> Tensor:
    """The mean of both directions; looking back, a positive searches the queries, and hard negatives search nothing."""
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
    the length √dim: a mean square of 1 for each coordinate, as after the last norm layer of a transformer. Without the
    scale the gradient would be about 2·dim times smaller than that of `mse`. The factor temperature² keeps the
    gradient's size at any temperature.
    """
    scale = students.shape[-1] ** 0.5
    student, target = (functional.normalize(vectors, dim=-1) * scale for vectors in (students, teachers))
    return distillation(student, target, temperature, temperature) * temperature**2


def matryoshka(dims: Sequence[int], loss_at: Callable[[int], Tensor]) -> Tensor:
    """The mean of a loss over nested dimensions; `loss_at(m)` cuts vectors to m before it normalises them."""
    return torch.stack([loss_at(dim) for dim in dims]).mean()


def not_negatives(same: Tensor, labels: Tensor) -> Tensor:
    """`same` (queries, documents) says which documents answer which query; all but the label are to be ignored."""
    ignored = same.clone()
    ignored[torch.arange(len(labels), device=labels.device), labels] = False
    return ignored


def likely_positives(teacher: Tensor, labels: Tensor, margin: float) -> Tensor:
    """True where the teacher scores a document above the positive by more than the margin."""
    own = teacher.gather(1, labels[:, None])
    return not_negatives(teacher > own + margin, labels)


def reconstruction(states: Tensor, vocabulary: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
    """Sum over the chosen tokens of the cross-entropy of naming them.

    States (texts, tokens, width), vocabulary (words, width), the others (texts, tokens). A sum, so that a batch in
    chunks adds up to the batch in one; words are scored for chosen tokens alone, for that is the largest tensor.
    """
    scores = functional.linear(states[chosen], vocabulary).float()
    return functional.cross_entropy(scores, targets[chosen], reduction="sum")

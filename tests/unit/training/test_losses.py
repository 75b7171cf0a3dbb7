"""Every loss against a loop that follows its formula, in double precision."""

import math

import pytest
import torch
from torch import Tensor

from models.training.losses import (
    alignment,
    distillation,
    info_nce,
    likely_positives,
    matryoshka,
    mse,
    not_negatives,
    reconstruction,
    similarities,
    symmetric_info_nce,
)

LABELS = torch.arange(5)


def vectors(rows: int, seed: int, dim: int = 6) -> Tensor:
    return torch.randn(rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(x) ** 2 for x in a)) / math.sqrt(sum(float(y) ** 2 for y in b))


def naive_info_nce(rows: list[list[float]], ignored: Tensor, temperature: float) -> float:
    total = 0.0
    for own, row in enumerate(rows):
        shown = sum(math.exp(score / temperature) for at, score in enumerate(row) if not ignored[own, at])
        total -= math.log(math.exp(row[own] / temperature) / shown)
    return total / len(rows)


def some_ignored(columns: int) -> Tensor:
    found = torch.rand(5, columns, generator=torch.Generator().manual_seed(9)) < 0.3
    return not_negatives(found, LABELS)


@pytest.mark.parametrize("temperature", [0.05, torch.tensor(0.7, dtype=torch.float64)])
def test_info_nce_has_in_batch_and_hard_negatives(temperature: float | Tensor) -> None:
    queries, documents, ignored = vectors(5, 0), vectors(8, 1), some_ignored(8)
    expected = naive_info_nce([[cosine(q, d) for d in documents] for q in queries], ignored, float(temperature))
    scores = similarities(queries, documents)
    assert info_nce(scores, LABELS, ignored, temperature).item() == pytest.approx(expected, abs=1e-6)


def test_inner_products_score_vectors_without_normalising() -> None:
    queries, documents = vectors(2, 0), vectors(3, 1)
    found = similarities(queries, documents, cosine=False)
    assert found[1, 2].item() == pytest.approx(sum(float(a * b) for a, b in zip(queries[1], documents[2], strict=True)))


def test_symmetric_info_nce_is_the_mean_of_both_directions() -> None:
    queries, documents, ignored = vectors(5, 2), vectors(7, 3), some_ignored(7)
    there = naive_info_nce([[cosine(q, d) for d in documents] for q in queries], ignored, 0.1)
    back = naive_info_nce([[cosine(q, d) for q in queries] for d in documents[:5]], ignored[:, :5].T, 0.1)
    found = symmetric_info_nce(similarities(queries, documents), LABELS, ignored, 0.1)
    assert found.item() == pytest.approx((there + back) / 2, abs=1e-6)


def test_mse_is_the_squared_distance_of_normalised_vectors() -> None:
    students, teachers = vectors(4, 4), vectors(4, 5)
    expected = sum(2 - 2 * cosine(a, b) for a, b in zip(students, teachers, strict=True)) / 4
    assert mse(students, teachers).item() == pytest.approx(expected, abs=1e-6)


def test_distillation_is_the_divergence_of_the_rows() -> None:
    student, teacher = vectors(3, 6), vectors(3, 7)
    expected = 0.0
    for row in range(3):
        p = [math.exp(x / 0.1) for x in teacher[row]]
        q = [math.exp(x / 0.5) for x in student[row]]
        expected += sum(a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True)) / 3
    assert distillation(student, teacher, 0.5, 0.1).item() == pytest.approx(expected, abs=1e-6)
    assert distillation(student, student, 0.3, 0.3).item() == pytest.approx(0, abs=1e-6)


def test_alignment_is_the_divergence_over_the_dimensions_of_states() -> None:
    students, teachers = vectors(3, 12), vectors(3, 13)
    expected = 0.0
    for student, teacher in zip(students, teachers, strict=True):
        p, q = (
            [math.exp(float(x) / math.sqrt(float((row**2).sum())) * math.sqrt(6) / 0.5) for x in row]
            for row in (teacher, student)
        )
        expected += sum(a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True)) / 3
    assert alignment(students, teachers, 0.5).item() == pytest.approx(0.25 * expected, abs=1e-6)
    assert alignment(students, 3 * students, 1.0).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dim", [32, 2560])
def test_the_gradients_of_alignment_and_mse_have_a_similar_size(dim: int) -> None:
    teachers = vectors(4, 14, dim)
    students = (teachers + 0.3 * vectors(4, 15, dim)).requires_grad_(True)
    sizes = [
        torch.autograd.grad(loss, students)[0].norm().item()
        for loss in (alignment(students, teachers, 1.0), mse(students, teachers))
    ]
    assert 0.3 < sizes[0] / sizes[1] < 3


def test_matryoshka_truncates_before_it_normalises() -> None:
    queries, documents = vectors(5, 8), vectors(5, 9)
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    expected = 0.0
    for dim in (2, 4, 6):
        rows = [[cosine(q[:dim], d[:dim]) for d in documents] for q in queries]
        expected += naive_info_nce(rows, nothing, 0.2) / 3

    def loss_at(dim: int) -> Tensor:
        return info_nce(similarities(queries[:, :dim], documents[:, :dim]), LABELS, nothing, 0.2)

    assert matryoshka([2, 4, 6], loss_at).item() == pytest.approx(expected, abs=1e-6)


def test_an_answer_that_is_not_the_label_is_no_negative() -> None:
    same = torch.tensor([[True, False, True], [False, True, False]])
    assert not_negatives(same, torch.tensor([0, 1])).tolist() == [[False, False, True], [False, False, False]]


def test_documents_that_the_teacher_prefers_by_the_margin_are_no_negatives() -> None:
    teacher = torch.tensor([[0.5, 0.55, 0.7], [0.9, 0.1, 0.15]])
    found = likely_positives(teacher, torch.tensor([0, 1]), 0.1)
    assert found.tolist() == [[False, False, True], [True, False, False]]


def test_reconstruction_counts_only_the_chosen_tokens() -> None:
    states, vocabulary = vectors(6, 10, dim=3).reshape(2, 3, 3), vectors(4, 11, dim=3)
    targets = torch.tensor([[0, 1, 2], [3, 0, 1]])
    chosen = torch.tensor([[True, False, True], [False, True, False]])
    expected = 0.0
    for text in range(2):
        for token in range(3):
            if chosen[text, token]:
                scores = [float(states[text, token] @ word) for word in vocabulary]
                own = math.exp(scores[int(targets[text, token])])
                expected -= math.log(own / sum(map(math.exp, scores)))
    assert reconstruction(states, vocabulary, targets, chosen).item() == pytest.approx(expected, abs=1e-6)

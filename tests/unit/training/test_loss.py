import math

import pytest
import torch

from models.training.loss import distillation, info_nce, not_negatives


def test_info_nce_equals_a_naive_loop() -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 8, dtype=torch.float64)
    labels = torch.arange(5)
    ignored = torch.rand(5, 8) < 0.3
    ignored[labels, labels] = False
    expected = 0.0
    for query in range(5):
        shown = [math.exp(scores[query, d] / 0.05) for d in range(8) if not ignored[query, d]]
        expected -= math.log(math.exp(scores[query, query] / 0.05) / sum(shown)) / 5
    assert info_nce(scores, labels, ignored, 0.05).item() == pytest.approx(expected, abs=1e-6)


def test_distillation_equals_a_naive_loop() -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(3, 6, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)
    expected = 0.0
    for query in range(3):
        p = [math.exp(x / 0.1) for x in teacher[query]]
        q = [math.exp(x / 0.5) for x in student[query]]
        expected += sum(a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True)) / 3
    assert distillation(student, teacher, 0.5, 0.1).item() == pytest.approx(expected, abs=1e-6)


def test_distillation_from_oneself_is_nothing() -> None:
    scores = torch.randn(4, 4)
    assert distillation(scores, scores, 0.1, 0.1).item() == pytest.approx(0, abs=1e-6)


def test_a_copy_of_the_positive_is_no_negative() -> None:
    positives, documents = torch.tensor([7, 8, 7]), torch.tensor([7, 8, 7, 9])
    found = not_negatives(positives, documents, torch.arange(3))
    assert found.tolist() == [[False, False, True, False], [False] * 4, [True, False, False, False]]

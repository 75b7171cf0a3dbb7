"""The sum of loss terms against a loop over its formulas."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from models.training.losses import (
    Contrasted,
    Objective,
    alignment,
    distillation,
    info_nce,
    mse,
    similarities,
    with_hypothetical,
)
from models.training.stages import Loss

NOTHING = torch.zeros(4, 6, dtype=torch.bool)
LABELS = torch.arange(4)


def vectors(rows: int, seed: int, dim: int = 8) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def batch(**changes: Tensor) -> Contrasted:
    given = {"queries": vectors(4, 0), "documents": vectors(6, 1), "answers": NOTHING.clone()}
    return Contrasted(**given | changes)


def test_stage_one_is_the_weighted_sum_of_contrast_and_distance() -> None:
    """Formula 3 of the paper, written out."""
    targets = vectors(4, 2, dim=5)
    loss, terms = Objective(Loss(info_nce=0.5, mse=2.0, temperature=0.1), 5)(batch(targets=targets))
    q, d, t = (normalize(part[:, :5], dim=1) for part in (vectors(4, 0), vectors(6, 1), targets))
    contrast = distance = 0.0
    for row in range(4):
        exponentials = [float(torch.exp(q[row] @ d[column] / 0.1)) for column in range(6)]
        contrast -= float(torch.log(torch.tensor(exponentials[row] / sum(exponentials)))) / 4
        distance += float(((q[row] - t[row]) ** 2).sum()) / 4
    assert terms["info_nce"].item() == pytest.approx(contrast, abs=1e-5)
    assert terms["mse"].item() == pytest.approx(distance, abs=1e-6)
    assert loss.item() == pytest.approx(0.5 * contrast + 2 * distance, abs=1e-5)


def test_every_term_is_averaged_over_nested_dimensions() -> None:
    targets = vectors(4, 2)
    loss, _ = Objective(Loss(mse=1.0, temperature=0.1, dims=[8, 3]), 8)(batch(targets=targets))
    parts = [Objective(Loss(mse=1.0, temperature=0.1), dim)(batch(targets=targets))[0] for dim in (8, 3)]
    assert loss.item() == pytest.approx(float(sum(parts)) / 2, abs=1e-6)


def test_a_learned_temperature_has_a_gradient_and_a_floor() -> None:
    own = Objective(Loss(temperature=0.1, learnable=True), 8)
    own(batch())[0].backward()
    assert own.log_temperature is not None
    assert own.log_temperature.grad is not None
    assert own.log_temperature.grad.abs() > 0
    with torch.no_grad():
        own.log_temperature.fill_(-20.0)
    assert float(torch.as_tensor(own.temperature).detach()) == pytest.approx(0.005)
    own.zero_grad()
    own(batch())[0].backward()
    assert own.log_temperature.grad.abs() > 0, "it can rise again"


def test_known_answers_and_documents_preferred_by_the_teacher_are_no_negatives() -> None:
    answers = NOTHING.clone()
    answers[0, 3] = True
    teacher = torch.zeros(4, 6)
    teacher[1, 4] = 0.5
    ignored = answers.clone()
    ignored[1, 4] = True
    settings = Loss(temperature=0.1, false_negative_margin=0.2)
    loss, _ = Objective(settings, 8)(batch(answers=answers, teacher=teacher))
    expected = info_nce(similarities(vectors(4, 0), vectors(6, 1)), LABELS, ignored, 0.1)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_margin_that_no_cosines_reach_asks_for_no_teacher() -> None:
    assert Loss(false_negative_margin=0.2).needs_scores
    assert not Loss(false_negative_margin=2.0).needs_scores
    assert Loss(false_negative_margin=2.0, distil=1.0).needs_scores


def test_scores_and_embeddings_are_distilled() -> None:
    teacher, targets = vectors(4, 3, dim=6), vectors(4, 2)
    settings = Loss(info_nce=0, distil=1.0, align=1.0, temperature=0.3, teacher_temperature=0.2)
    _, terms = Objective(settings, 8)(batch(teacher=teacher, targets=targets))
    scores = similarities(vectors(4, 0), vectors(6, 1))
    assert terms["distil"].item() == pytest.approx(distillation(scores, teacher, 0.3, 0.2).item(), abs=1e-6)
    assert terms["align"].item() == pytest.approx(alignment(vectors(4, 0), targets, 0.3).item(), abs=1e-6)
    assert set(terms) == {"distil", "align"}


def test_each_row_has_its_own_hard_negative_as_equation_one_says() -> None:
    """CardioEmbed: own positive, own hard negative, and the positives of the other rows."""
    documents = vectors(8, 1)
    others = torch.zeros(4, 8, dtype=torch.bool)
    others[:, 4:] = ~torch.eye(4, dtype=torch.bool)
    given = Contrasted(vectors(4, 0), documents, torch.zeros(4, 8, dtype=torch.bool), others)
    loss, _ = Objective(Loss(temperature=0.1), 8)(given)
    q, d = normalize(vectors(4, 0), dim=1), normalize(documents, dim=1)
    expected = 0.0
    for row in range(4):
        exponentials = [float(torch.exp(q[row] @ d[column] / 0.1)) for column in (0, 1, 2, 3, 4 + row)]
        expected -= float(torch.log(torch.tensor(exponentials[row] / sum(exponentials)))) / 4
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_bm25_is_mixed_on_a_common_scale() -> None:
    settings = Loss(info_nce=0, distil=1.0, lexical_share=0.25, temperature=0.3, teacher_temperature=0.1)
    teacher, lexical = torch.rand(4, 6), torch.rand(4, 6)
    _, terms = Objective(settings, 8)(batch(teacher=teacher, lexical=lexical))
    low, high = teacher.amin(1, keepdim=True), teacher.amax(1, keepdim=True)
    target = 0.75 * (teacher - low) / (high - low) + 0.25 * lexical
    expected = distillation(similarities(vectors(4, 0), vectors(6, 1)), target, 0.3, 0.1)
    assert terms["distil"].item() == pytest.approx(expected.item(), abs=1e-5)


def test_unnormalised_vectors_are_scored_by_inner_products() -> None:
    loss, _ = Objective(Loss(temperature=1.0, similarity="dot"), 8)(batch())
    expected = info_nce(vectors(4, 0) @ vectors(6, 1).T, LABELS, NOTHING, 1.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_query_is_averaged_with_its_hypothetical_documents() -> None:
    queries, imagined = vectors(3, 4), vectors(3, 5)
    found = with_hypothetical(queries, imagined, torch.tensor([0, 0, 2]))
    unit_q, unit_h = normalize(queries, dim=1), normalize(imagined, dim=1)
    torch.testing.assert_close(found[0], (unit_q[0] + unit_h[0] + unit_h[1]) / 3)
    torch.testing.assert_close(found[1], unit_q[1])
    torch.testing.assert_close(found[2], (unit_q[2] + unit_h[2]) / 2)
    assert mse(found[1:2], queries[1:2]).item() == pytest.approx(0, abs=1e-6)

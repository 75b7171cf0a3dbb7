"""The stand-in for pytrec_eval: by hand, against the real one if it is installed, and as mteb imports it."""

import random
import subprocess
import sys
from math import log2

import pytest

from models.errors import CareError
from models.evaluation.mteb_model import RelevanceEvaluator, import_mteb

MEASURES = {f"{name}.1,2,5,100" for name in ("ndcg_cut", "map_cut", "recall", "P", "success")}


def test_the_stand_in_equals_values_computed_by_hand() -> None:
    qrels = {"q": {"a": 2, "b": 1, "c": 1, "d": 0, "e": -1}}
    found = {"q": {"d": 0.9, "a": 0.8, "x": 0.7, "b": 0.6, "e": 0.5}}
    scores = RelevanceEvaluator(qrels, MEASURES).evaluate(found)["q"]
    assert len(scores) == 20
    ideal = 2 + 1 / log2(3) + 1 / log2(4)
    assert scores["ndcg_cut_1"] == 0
    assert scores["ndcg_cut_2"] == pytest.approx((2 / log2(3)) / (2 + 1 / log2(3)))
    assert scores["ndcg_cut_5"] == pytest.approx((2 / log2(3) + 1 / log2(5)) / ideal)
    assert scores["map_cut_2"] == pytest.approx((1 / 2) / 3)
    assert scores["map_cut_100"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    assert scores["recall_5"] == pytest.approx(2 / 3)
    assert scores["P_5"] == pytest.approx(2 / 5)
    assert scores["P_100"] == pytest.approx(2 / 100)
    assert (scores["success_1"], scores["success_2"]) == (0, 1)


def test_ties_are_broken_by_the_later_id_and_unjudged_queries_are_left_out() -> None:
    evaluator = RelevanceEvaluator({"q": {"a": 1}, "none relevant": {"a": 0}}, {"success.1"})
    found = {"q": {"a": 0.5, "b": 0.5}, "none relevant": {"a": 1.0}, "unjudged": {"a": 1.0}}
    assert evaluator.evaluate(found) == {"q": {"success_1": 0.0}, "none relevant": {"success_1": 0.0}}
    # Scores are single-precision numbers there: a difference below that precision is a tie, too.
    assert evaluator.evaluate({"q": {"a": 0.5 + 1e-12, "b": 0.5}}) == {"q": {"success_1": 0.0}}


def test_the_real_pytrec_eval_gives_the_same() -> None:
    real = pytest.importorskip("pytrec_eval", reason="has no wheel for this CPU")
    if real.RelevanceEvaluator is RelevanceEvaluator:
        pytest.skip("has no wheel for this CPU, and another test has put the stand-in in its place")
    draw = random.Random(7)
    documents = [f"d{row}" for row in range(30)]
    for _ in range(50):
        qrels = {
            f"q{row}": {document: draw.choice([-1, 0, 0, 1, 2]) for document in draw.sample(documents, 12)}
            for row in range(5)
        }
        found = {
            f"q{row}": {document: draw.choice([0.1, 0.2, draw.random()]) for document in draw.sample(documents, size)}
            for row, size in enumerate((1, 3, 10, 20, 30, 30))
        }
        expected = real.RelevanceEvaluator(qrels, MEASURES).evaluate(found)
        ours = RelevanceEvaluator(qrels, MEASURES).evaluate(found)
        assert ours.keys() == expected.keys()
        assert all(ours[query] == pytest.approx(expected[query]) for query in expected)


def test_mteb_is_imported_without_pytrec_eval() -> None:
    code = (
        "import sys; sys.modules['pytrec_eval'] = None\n"
        "from models.evaluation.mteb_model import import_mteb\n"
        "mteb = import_mteb()\n"
        "assert import_mteb() is mteb\n"
        "print(mteb._evaluators.retrieval_metrics.pytrec_eval.RelevanceEvaluator.__module__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "models.evaluation.mteb_model"


def test_without_mteb_the_error_names_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(CareError, match="pip install mteb"):
        import_mteb()

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from models.errors import BadData
from models.evaluation.results import SetResult
from models.evaluation.significance import RESAMPLES, Mark, _holm, compare, paired, per_query
from tests.support.runs import make_run, pair_result, set_result

GENERATOR = np.random.default_rng(7)
BASE = GENERATOR.random(200).round(3)


def shifted(by: float, spread: float = 0.2) -> list[float]:
    """Returns the base values, each moved a little: paired with them, but not equal."""
    noise = np.random.default_rng(8).normal(by, spread, len(BASE))
    values: list[float] = (BASE + noise).tolist()
    return values


def mark_of(values: list[float]) -> Mark:
    [mark] = paired([set_result("other", values)], set_result("base", BASE.tolist()))
    return mark


def test_a_clear_difference_is_marked_in_its_direction() -> None:
    better, worse = mark_of(shifted(0.1)), mark_of(shifted(-0.15))
    assert (better.symbol, worse.symbol) == ("↑", "↓")
    assert better.p == pytest.approx(1 / (1 + RESAMPLES))
    assert better.low > 0 > worse.high


def test_equal_systems_show_no_difference() -> None:
    mark = mark_of(BASE.tolist())
    assert (mark.difference, mark.low, mark.high, mark.p, mark.symbol) == (0, 0, 0, 1.0, "")


@pytest.mark.parametrize("by", [0.005, 0.02, 0.035])
def test_the_bootstrap_agrees_with_the_paired_t_test(by: float) -> None:
    values = shifted(by)
    mark = mark_of(values)
    expected = stats.ttest_rel(values, BASE)
    assert mark.difference == pytest.approx(100 * float(np.mean(values) - BASE.mean()))
    assert mark.p == pytest.approx(expected.pvalue, abs=0.02)
    assert mark.t_test == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (mark.low, mark.high) == pytest.approx((100 * interval.low, 100 * interval.high), abs=0.25)


def test_the_t_test_is_reported_for_sets_but_not_for_averages() -> None:
    results = [set_result("other", shifted(0.02), set_name=name) for name in ("one", "two")]
    baselines = [set_result("base", BASE.tolist(), set_name=name) for name in ("one", "two")]
    found = {sets: mark.t_test for (_, sets, _), mark in compare(make_run([*results, *baselines]), "base").items()}
    expected = stats.ttest_rel(shifted(0.02), BASE).pvalue
    assert found == {("one",): pytest.approx(expected), ("two",): pytest.approx(expected), ("one", "two"): None}
    assert mark_of(BASE.tolist()).t_test is None, "no query differs"


def test_the_bootstrap_is_deterministic() -> None:
    assert mark_of(shifted(0.02)) == mark_of(shifted(0.02))


def test_the_false_positive_rate_is_as_stated() -> None:
    """Two systems without a difference, two hundred times: about one in twenty is significant before correction."""
    differences = np.random.default_rng(3).normal(0, 0.3, (200, 60))
    results = [set_result(str(number), row.tolist()) for number, row in enumerate(differences)]
    marks = paired(results, set_result("base", [0.0] * 60))
    assert sum(bool(mark.symbol) for mark in marks) == pytest.approx(10, abs=8)


def test_too_few_queries_give_a_difference_without_a_test() -> None:
    [mark] = paired([set_result("other", [1.0] * 5)], set_result("base", [0.5] * 5))
    assert (mark.difference, mark.p, mark.symbol) == (50.0, None, "")


def correlated(agreement: float, seed: int) -> SetResult:
    generator = np.random.default_rng(seed)
    gold = np.random.default_rng(11).integers(0, 6, 150).astype(float)
    similarities = agreement * (gold - gold.mean()) / gold.std() + generator.normal(size=150)
    value = 100 * float(stats.pearsonr(similarities, gold).statistic)
    return pair_result(f"system {agreement}", similarities.tolist(), gold.tolist(), value)


def test_correlations_are_compared_by_resampling_pairs() -> None:
    weak, strong, like_weak = correlated(0.5, 1), correlated(2.0, 2), correlated(0.5, 3)
    better, equal = paired([strong, like_weak], weak)
    assert better.symbol == "↑"
    assert better.difference == pytest.approx(strong.value - weak.value)
    assert equal.symbol == ""
    drawn = np.random.default_rng(5).integers(0, 150, (4000, 150))
    gold, mine, theirs = (
        np.array([pair.metrics[name] for pair in result.queries])[drawn]
        for result, name in ((weak, "gold score"), (strong, "similarity"), (weak, "similarity"))
    )
    by_scipy = stats.pearsonr(mine, gold, axis=1).statistic - stats.pearsonr(theirs, gold, axis=1).statistic
    assert (better.low, better.high) == pytest.approx(100 * np.percentile(by_scipy, (2.5, 97.5)), abs=1.0)


def test_spearman_depends_only_on_ranks() -> None:
    pairs = correlated(1.0, 4)
    similarities = np.array([pair.metrics["similarity"] for pair in pairs.queries])
    gold = [pair.metrics["gold score"] for pair in pairs.queries]
    value = 100 * float(stats.spearmanr(similarities, gold).statistic)
    plain = pair_result("plain", similarities.tolist(), gold, value, "Spearman")
    bent = pair_result("bent", np.exp(similarities).tolist(), gold, value, "Spearman")
    [mark] = paired([bent], plain)
    assert mark.p == 1.0
    assert 100 * per_query(plain).mean() == pytest.approx(value)


def test_the_figure_is_the_mean_over_queries() -> None:
    pairs = correlated(1.0, 6)
    assert 100 * per_query(pairs).mean() == pytest.approx(pairs.value)
    retrieval = set_result("s", [0.0, 0.5, 1.0])
    assert per_query(retrieval).tolist() == [0.0, 0.5, 1.0]


def test_every_system_is_compared_with_the_baseline_on_common_sets() -> None:
    run = make_run(
        [
            set_result("BM25", BASE.tolist(), "one"),
            set_result("dense", shifted(0.1), "one"),
            set_result("dense", shifted(0.1), "two"),
        ]
    )
    marks = compare(run, "BM25")
    assert list(marks) == [("bench", ("one",), "dense")]
    assert marks["bench", ("one",), "dense"].baseline == "BM25"


def test_p_values_of_one_table_are_corrected_by_holm() -> None:
    values = {"a": shifted(0.1), "b": shifted(0.035), "c": shifted(0.02)}
    baseline = set_result("base", BASE.tolist())
    results = [set_result(name, own) for name, own in values.items()]
    raw = {name: mark.p for name, mark in zip(values, paired(results, baseline), strict=True)}
    corrected = compare(make_run([baseline, *results]), "base")
    found = {name: corrected["bench", ("one",), name].p for name in values}
    assert raw["a"] is not None
    assert raw["b"] is not None
    assert raw["c"] is not None
    assert found == {"a": 3 * raw["a"], "b": 2 * raw["b"], "c": max(2 * raw["b"], raw["c"])}
    alone = compare(make_run([baseline, results[1]]), "base")
    assert alone["bench", ("one",), "b"].p == raw["b"]


def test_a_corrected_p_is_never_below_that_of_a_clearer_difference() -> None:
    close = {("bench", ("one",), str(p)): Mark("base", 1.0, 0.5, 1.5, p) for p in (0.021, 0.02, 0.01, 0.6)}
    untested = {("bench", ("few",), "x"): Mark("base", 1.0, 1.0, 1.0, None)}
    corrected = _holm(close | untested)
    assert [mark.p for mark in corrected.values()] == pytest.approx([0.06, 0.06, 0.04, 0.6, None])


def test_an_average_is_tested_over_the_queries_of_all_its_sets() -> None:
    """Against a naive loop: every set is drawn on its own, and all sets have the same weight."""
    sets = {"one": (BASE, np.array(shifted(0.03))), "two": (BASE[:50], np.array(shifted(0.02, 0.3))[:50])}
    results = [
        set_result(system, values.tolist(), name)
        for name, pair in sets.items()
        for system, values in zip(("base", "other"), pair, strict=True)
    ]
    mark = compare(make_run(results), "base")["bench", ("one", "two"), "other"]
    differences = [other - base for base, other in sets.values()]
    observed = sum(each.mean() for each in differences) / 2
    generator = np.random.default_rng(99)
    drawn = [sum(generator.choice(each, len(each)).mean() for each in differences) / 2 for _ in range(4000)]
    assert mark.difference == pytest.approx(100 * observed)
    assert (mark.low, mark.high) == pytest.approx(100 * np.percentile(drawn, (2.5, 97.5)), abs=0.3)
    p = float(np.mean(np.abs(np.array(drawn) - observed) >= abs(observed)))
    assert mark.p is not None
    assert mark.p / 3 <= p + 0.02 <= mark.p + 0.05, "corrected for at most three comparisons"


def test_sets_of_equal_size_are_resampled_independently_in_an_average() -> None:
    """The same set twice: drawn alike, the average would be as uncertain as one set alone."""
    values = shifted(0.02)
    pairs = [("base", BASE.tolist()), ("other", values)]
    marks = compare(make_run([set_result(s, v, name) for name in ("one", "two") for s, v in pairs]), "base")
    alone, both = (marks["bench", group, "other"] for group in (("one",), ("one", "two")))
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2**0.5, rel=0.05)


def test_an_average_of_a_set_with_too_few_queries_is_not_tested() -> None:
    few = [set_result(system, [0.5] * 5, "few") for system in ("base", "other")]
    many = [set_result("base", BASE.tolist()), set_result("other", shifted(0.1))]
    marks = compare(make_run([*many, *few]), "base")
    assert marks["bench", ("one", "few"), "other"].p is None


def test_a_baseline_without_results_gives_no_marks() -> None:
    assert compare(make_run([set_result("a", [1.0]), set_result("b", [1.0])]), "BM25") == {}


def test_different_queries_are_refused() -> None:
    with pytest.raises(BadData, match=r"one: other and base were not asked the same queries \(1 differ\)"):
        paired([set_result("other", [0.5] * 31)], set_result("base", [0.5] * 30))


def test_different_metrics_are_refused() -> None:
    other = replace(set_result("other", [0.5] * 30), main_metric="MRR@10")
    with pytest.raises(BadData, match=r"one: judged by MRR@10 for other and by nDCG@10 for base"):
        paired([other], set_result("base", [0.5] * 30))

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import BadData, CareError
from models.evaluation import diff
from models.evaluation.results import Hit, SetResult
from tests.support.runs import make_run, pair_result, set_result

GOLD = Hit("d1", "氨氯地平用于高血压", 2)
OTHER = Hit("d2", "布洛芬用于发热", 0)
BEFORE = [0.5] * 30
AFTER = [1.0, 0.5, 0.1, *[0.5] * 27]


def with_hits(result: SetResult, hits: list[Hit]) -> SetResult:
    return replace(result, queries=[replace(query, hits=hits, gold=[GOLD]) for query in result.queries])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    before, after = tmp_path / "before.json.gz", tmp_path / "after.json.gz"
    make_run([with_hits(set_result("dense", BEFORE), [OTHER, GOLD])]).save(before)
    make_run([with_hits(set_result("dense", AFTER), [GOLD, OTHER]), set_result("BM25", BEFORE)]).save(after)
    return before, after


def call(*arguments: object) -> None:
    parser = ArgumentParser()
    diff.add_arguments(parser)
    diff.run(parser.parse_args([str(argument) for argument in arguments]))


def test_the_diff_shows_figures_and_the_queries_that_changed_most(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    call(*runs, "--limit", 1)
    _, _, _, *shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["one · nDCG@10 · 30 queries", "  A  dense   50.00", "  B  dense   50.33"]
    assert shown[3].startswith("  B − A +0.33, 95 % between -")
    assert ", t-test p 0." in shown[3]
    assert shown[4:] == [
        "  1 better, 1 worse, 28 equal",
        "",
        "  1. 0.500 → 1.000  q0  问题 0",
        "     gold  grade 2  d1  氨氯地平用于高血压",
        "     A     grade 0  d2  布洛芬用于发热",
        "           grade 2  d1  氨氯地平用于高血压",
        "     B     grade 2  d1  氨氯地平用于高血压",
        "           grade 0  d2  布洛芬用于发热",
    ]


def test_unchanged_queries_are_not_shown(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    call(*runs)
    shown = capsys.readouterr().out
    assert "  2. 0.500 → 0.100  q2" in shown
    assert "  3. " not in shown


def test_two_systems_of_one_run_are_compared(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, after = runs
    call(after, after, "--system", "BM25", "--system", "dense")
    shown = capsys.readouterr().out
    assert "  A  BM25    50.00" in shown
    assert "  B  dense   50.33" in shown


def test_runs_of_one_system_each_need_no_names() -> None:
    before, after = (make_run([set_result(name, BEFORE)]) for name in ("old", "new"))
    assert diff.choose_systems(before, after, [], same_run=False) == [("old", "new")]


@pytest.mark.parametrize(
    ("named", "same_run", "message"),
    [
        (["nobody"], False, "--system nobody: A has no such system, only a, b"),
        (["a", "b", "c"], False, "--system may be given once or twice"),
        ([], True, r"A and B are one run; name two of its systems with --system \(a, b\)"),
        ([], False, r"no system is in both; give --system twice \(A: a, b; B: c\)"),
    ],
)
def test_an_ambiguous_choice_is_refused_with_advice(named: list[str], same_run: bool, message: str) -> None:
    before = make_run([set_result("a", BEFORE), set_result("b", BEFORE)])
    with pytest.raises(CareError, match=message):
        diff.choose_systems(before, make_run([set_result("c", BEFORE)]), named, same_run=same_run)


def test_the_error_for_an_unknown_set_lists_those_that_both_runs_have(runs: tuple[Path, Path]) -> None:
    with pytest.raises(CareError, match=r"--set two: not a set that both were judged on \(one\)"):
        call(*runs, "--set", "two")


def test_sets_of_different_queries_are_refused() -> None:
    before, after = make_run([set_result("s", BEFORE)]), make_run([set_result("s", BEFORE[1:])])
    with pytest.raises(BadData, match="not asked the same queries"):
        diff.compare(before, after, [("s", "s")], None)


def test_pairs_are_shown_with_both_sentences_and_the_gold_score() -> None:
    gold = [0.0, 1.0] * 15
    steady = [0.1, 0.9] * 15
    before = pair_result("s", steady, gold, 100.0)
    after = pair_result("s", [0.9, *steady[1:]], gold, 90.0)
    [found] = diff.compare(make_run([before]), make_run([after]), [("s", "s")], "pairs")
    shown = list(diff.lines(found, 1))
    assert shown[0] == "pairs · Pearson · 30 pairs"
    assert shown[-2:] == ["  1. 0.100 → 0.900  0  甲 0 ⇆ 乙 0", "     given 0"]


def test_long_texts_are_cut_to_the_width_of_a_terminal() -> None:
    long = Hit("d9", "很长的文字" * 60, 1)
    [before, after] = (with_hits(set_result("s", values), [long]) for values in (BEFORE, AFTER))
    [found] = diff.compare(make_run([before]), make_run([after]), [("s", "s")], None)
    shown = [line for line in diff.lines(found, 1) if "d9" in line]
    assert all(line.endswith("…") and len(line) < 80 for line in shown)
    assert len(shown) == 2


def test_a_file_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(b"nothing")
    with pytest.raises(BadData, match=r"x\.json\.gz: not a run"):
        call(path, path)

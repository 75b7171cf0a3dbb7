from dataclasses import replace

import pytest

from models.evaluation.report.tables import display_width, tables, text
from models.evaluation.results import SetResult
from models.evaluation.sets import Kind
from models.evaluation.significance import Mark, Marks
from tests.support.runs import make_run, pair_result, set_result

UP = Mark("BM25", 10.0, 5.0, 15.0, 0.001)
DOWN = Mark("BM25", -10.0, -15.0, -5.0, 0.001)
MARKS: Marks = {("bench", ("one",), "dense"): UP, ("bench", ("two",), "dense"): DOWN}


def rerank(system: str, value: float) -> SetResult:
    result = set_result(system, [value], "lists")
    queries = [replace(query, metrics={"MAP@10": value}) for query in result.queries]
    return replace(result, kind=Kind.RERANK, main_metric="MAP@10", metrics={"MAP@10": 100 * value}, queries=queries)


RESULTS = [
    set_result("BM25", [0.5], "one"),
    set_result("dense", [0.6], "one"),
    set_result("BM25", [0.4], "two"),
    set_result("dense", [0.3], "two"),
    rerank("dense", 0.8),
    pair_result("dense", [0.0, 1.0], [0.0, 1.0], 70.0),
]


def test_the_terminal_shows_sets_averages_and_marks() -> None:
    shown = text(make_run(RESULTS), MARKS).splitlines()
    assert shown[:5] == [
        "bench      one       two     average    lists     pairs   average",
        "       nDCG@10   nDCG@10   retrieval   MAP@10   Pearson       all",
        "─" * 66,
        "BM25     50.00     40.00       45.00        –         –         –",
        "dense    60.00↑    30.00↓      45.00    80.00     70.00     60.00",
    ]
    assert " ".join(shown[6:]).startswith("↑ ↓ better or worse than BM25 beyond chance: paired bootstrap")


def test_an_average_shows_its_mark_and_the_statistics_behind_it() -> None:
    shown = text(make_run(RESULTS[:4]), {("bench", ("one", "two"), "dense"): UP}).splitlines()
    assert shown[4] == "dense    60.00     30.00     45.00↑"
    assert shown[-1] == (
        "bench, average of one, two: dense +10.00 against BM25, 95 % between +5.00 and +15.00, p 0.0010 (corrected)"
    )


def test_an_average_needs_all_sets() -> None:
    [table] = tables(make_run(RESULTS))
    averages = [column.sets for column in table.columns if column.is_average]
    assert averages == [("one", "two"), ("one", "two", "lists", "pairs")]
    assert [cell.value for cell in table.rows["BM25"]] == [50.0, 40.0, 45.0, None, None, None]


def test_one_kind_has_one_average_under_its_metric() -> None:
    [table] = tables(make_run(RESULTS[:4]))
    assert [(column.title, column.subtitle) for column in table.columns][-1] == ("average", "nDCG@10")


def test_the_best_of_a_column_is_chosen_by_printed_digits() -> None:
    results = [set_result("a", [0.50001]), set_result("b", [0.50002]), set_result("c", [0.4]), rerank("a", 0.9)]
    [table] = tables(make_run(results))
    assert [[cell.best for cell in row[:2]] for row in table.rows.values()] == [
        [True, False],
        [True, False],
        [False, False],
    ]


def test_each_benchmark_has_a_table() -> None:
    run = make_run([set_result("a", [0.5], benchmark="x"), set_result("a", [0.6], benchmark="y")])
    assert [(table.benchmark, table.rows["a"][0].value) for table in tables(run)] == [("x", 50.0), ("y", 60.0)]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_wide_table_is_continued_below(width: int) -> None:
    names = [f"set number {number}" for number in range(12)]
    run = make_run([set_result("a system", [0.5], name) for name in names], missing={"far": "fetch it " * 20})
    shown = text(run, width=width)
    assert all(display_width(line) <= width for line in shown.splitlines())
    assert all(name in shown for name in names)
    assert shown.count("\na system ") == shown.count("\n───")
    assert "not judged: far (fetch it" in shown


def test_columns_with_chinese_names_are_aligned() -> None:
    shown = text(make_run([set_result("混合检索", [0.5], "诊断编码"), set_result("b", [0.6], "诊断编码")]))
    widths = {display_width(line.rstrip()) for line in shown.splitlines()[3:5]}
    assert len(widths) == 1

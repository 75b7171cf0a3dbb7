"""The judge of a load test: what it reads, what it counts, and its one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.slo import BadStats, Limits, Row, judge, main, read_rows

HEADER = "Type,Name,Request Count,Failure Count,Median Response Time,50%,95%,99%\n"
STATS = (
    HEADER
    + "POST,search hybrid,80,1,20,20,40,90\n"
    + "GET,search by URL,20,0,20,20,60,70\n"
    + "POST,batch,10,1,200,200,900,950\n"
    + "POST,refused (429),10,0,1,1,2,3\n"
    + "GET,document,0,0,0,N/A,N/A,N/A\n"
    + ",Aggregated,120,2,20,20,800,900\n"
)
OPEN = Limits(p95_ms=None, p99_ms=None, errors=1.0, refused=1.0)


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    path = tmp_path / "run_stats.csv"
    path.write_text(STATS)
    return path


def test_rows_are_those_with_requests_and_not_their_sum(stats: Path) -> None:
    rows = read_rows(stats)
    assert [row.name for row in rows] == ["search hybrid", "search by URL", "batch", "refused (429)"]
    assert rows[0] == Row("search hybrid", requests=80, failures=1, p95_ms=40, p99_ms=90)


def test_latency_is_that_of_the_slowest_kind_of_search(stats: Path) -> None:
    rows = read_rows(stats)
    assert judge(rows, Limits(60, 90, 1, 1)).misses == ()
    assert judge(rows, Limits(59, None, 1, 1)).misses == ("p95 of search by URL 60 ms (limit 59 ms)",)
    assert judge(rows, Limits(None, 89, 1, 1)).misses == ("p99 of search hybrid 90 ms (limit 89 ms)",)


def test_errors_and_refusals_are_shares_of_their_own(stats: Path) -> None:
    rows = read_rows(stats)
    assert judge(rows, Limits(None, None, 2 / 110, 10 / 120)).misses == ()
    assert judge(rows, Limits(None, None, 0.01, 0.05)).misses == (
        "errors 1.82% (limit 1.00%)",
        "refused 8.33% (limit 5.00%)",
    )


def test_every_figure_is_in_the_summary(stats: Path) -> None:
    assert judge(read_rows(stats), OPEN).summary == (
        "120 requests, p95 of search by URL 60 ms, p99 of search hybrid 90 ms, errors 1.82%, refused 8.33%"
    )


def test_a_run_without_a_search_meets_no_limit() -> None:
    with pytest.raises(BadStats, match="no search was made"):
        judge([Row("page", 5, 0, 1, 1)], OPEN)


def test_limits_met_end_with_zero_and_one_line(stats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(stats), "--p95-ms", "60", "--p99-ms", "90", "--errors", "0.1", "--refused", "0.1"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("SLO met: 120 requests")
    assert said.out.count("\n") == 1


def test_limits_missed_end_with_one_and_one_line(stats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(stats), "--p95-ms", "50"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "SLO missed: p95 of search by URL 60 ms (limit 50 ms); "
        "errors 1.82% (limit 0.00%); refused 8.33% (limit 0.00%)\n"
    )


@pytest.mark.parametrize(
    "content", [None, "", HEADER, "Name,Colour\nsearch,red\n", HEADER + "POST,search,many,0,0,0,0,0\n"]
)
def test_what_is_no_statistics_is_not_judged(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run_stats.csv"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("SLO not judged: ")
    assert said.count("\n") == 1

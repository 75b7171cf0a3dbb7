"""The GPU benchmark: parsing of wrk, nvidia-smi and service metrics, and the check of its goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.harness import BenchError
from loadtest.lab.gpu import Load, Reading, Row, as_markdown, busy_share, drive, read_summary, write_bodies

PRINTED = """Running 3s test @ http://127.0.0.1:8000
  4 threads and 8 connections
{"requests":3000,"microseconds":3000000,"p50":1500,"p99":24000,"status":0,"connect":0,"read":0,"write":0,"timeout":0}
"""


def load(connections: int, per_second: int, p50_ms: float, p99_ms: float, **failures: int) -> Load:
    return Load(connections, 10 * per_second, 10.0, p50_ms, p99_ms, failures, 15.0)


USAGE = Reading(queries=257.0, batches=4.0, engine_seconds=0.9, engine_cores=1.0, workers_cores=8.0)


def test_the_summary_is_the_last_line() -> None:
    found = read_summary(PRINTED, 8, 1.5)
    assert found == Load(8, 3000, 3.0, 1.5, 24.0, {}, 1.5)
    assert found.searches_per_second == 1000


def test_error_answers_do_not_count_as_searches() -> None:
    found = read_summary(PRINTED.replace('"status":0', '"status":600'), 8, 1.5)
    assert found.failures == {"status": 600}
    assert found.searches_per_second == 800


@pytest.mark.parametrize("printed", ["", "unable to connect\n", '{"requests":1}\n'])
def test_output_without_a_summary_is_refused(printed: str) -> None:
    with pytest.raises(BenchError, match="wrk printed no summary"):
        read_summary(printed, 1, 0.0)


def test_a_missing_generator_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="is not there; install Debian's package wrk"):
        drive(str(tmp_path / "wrk"), "http://127.0.0.1:1", tmp_path, 1, 1)


def test_queries_have_the_requested_number_of_tokens(tmp_path: Path) -> None:
    write_bodies(tmp_path / "bodies", 200, (8, 32))
    bodies = [json.loads(line) for line in (tmp_path / "bodies").read_text(encoding="utf-8").splitlines()]
    assert {body["mode"] for body in bodies} == {"dense"}
    lengths = {len(body["query"]) + 2 for body in bodies}
    assert (min(lengths), max(lengths)) == (8, 32)
    assert len({body["query"] for body in bodies}) == 200


def test_usage_is_the_difference_of_two_readings() -> None:
    before = Reading(queries=100, batches=10, engine_seconds=1.0, engine_cores=2.0, workers_cores=3.0)
    after = Reading(queries=900, batches=20, engine_seconds=6.0, engine_cores=7.0, workers_cores=43.0)
    assert after.since(before, 10.0) == Reading(80.0, 1.0, 0.5, 0.5, 4.0)
    assert after.since(before, 10.0).batch == 80.0
    assert before.since(before, 10.0).batch == 0.0


def test_gpu_usage_is_the_mean_of_its_samples() -> None:
    assert busy_share(["90", "70", ""]) == 0.8
    assert busy_share([]) is None


def test_the_goal_counts_only_runs_without_failures_and_within_the_latency_limit() -> None:
    rows = [
        Row(load(1, 400, 2.5, 4.0), USAGE, 0.2),
        Row(load(256, 12_000, 15.0, 24.0), USAGE, 0.875),
        Row(load(512, 15_000, 30.0, 40.0), USAGE, None),
        Row(load(1024, 16_000, 15.0, 20.0, status=5), USAGE, None),
    ]
    text = as_markdown({"commit": "abc1234"}, rows)
    assert "| 256 | 12,000 | 15.00 | 24.00 | 64.2 | 90% | 88% | 1.0 | 8.0 | 1.5 | 0 |" in text
    assert "at most 25 ms: 12,000 at 256 connections (at least 10,000: yes)" in text
    assert "- p50 of one connection: 2.50 ms (at most 4: yes)" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_missed_goals_are_shown() -> None:
    text = as_markdown({}, [Row(load(1, 9_000, 4.5, 26.0), USAGE, None)])
    assert "no line (at least 10,000: no)" in text
    assert "4.50 ms (at most 4: no)" in text

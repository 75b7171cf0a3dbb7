"""The plan of a benchmark run and the facts around its figures, with the client replaced by a recorder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadtest import bench
from loadtest.answers import read_queries
from loadtest.bench import BARE, CACHED, SCENARIOS, Bench, Report, Scenario, main, make_report
from loadtest.harness import QUERIES, BenchError, machine
from loadtest.harness.generator import Job, Measurement

SERVICE = "http://127.0.0.1:8001"
BARE_URL = "http://127.0.0.1:8002"
CACHED_URL = "http://127.0.0.1:8003"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Records every job of the benchmark; each one reports ten requests."""
    given: list[Job] = []

    def record(job: Job) -> Measurement:
        given.append(job)
        return Measurement(10, 1.0, [1.0], [5000 + len(given)], {}, {})

    monkeypatch.setattr(bench, "measure", record)
    return given


def test_rounds_alternate_and_neighbours_stay_neighbours(jobs: list[Job]) -> None:
    measured = Bench(SERVICE, ["头痛"], 0.5, CACHED_URL).run(BARE_URL, rounds=2)
    names = {BARE_URL: BARE, CACHED_URL: CACHED}
    asked = [(names.get(job.url, job.mode), job.connections) for job in jobs[1:]]
    first = [(scenario.mode, scenario.connections) for scenario in SCENARIOS]
    assert asked == first + first[::-1]
    assert {scenario: len(rounds) for scenario, rounds in measured.items()} == dict.fromkeys(SCENARIOS, 2)
    for at, scenario in enumerate(SCENARIOS):
        if scenario.mode == "hybrid":
            assert (SCENARIOS[at + 1].mode, SCENARIOS[at + 1].connections) == (BARE, scenario.connections)


def test_no_query_is_sent_twice_in_a_run(jobs: list[Job]) -> None:
    run = Bench(SERVICE, ["头痛"], 0.5)
    run.warm_up()
    run.run(BARE_URL, rounds=2)
    assert [job.first_number for job in jobs] == list(range(0, 10 * len(jobs), 10))


def test_the_bare_framework_gets_the_same_requests_and_needs_no_timings(jobs: list[Job]) -> None:
    Bench(SERVICE, ["头痛"], 0.5).run(BARE_URL, rounds=1)
    assert {(job.mode, job.timings) for job in jobs if job.url == BARE_URL} == {("hybrid", False)}
    assert {job.timings for job in jobs if job.url == SERVICE} == {True}


def test_the_warm_up_uses_every_scenario_and_learns_the_answer_size(jobs: list[Job]) -> None:
    assert Bench(SERVICE, ["头痛"], 7).warm_up() == 5003  # the third job is hybrid over one connection
    assert {job.url for job in jobs} == {SERVICE}
    assert {job.seconds for job in jobs} == {1.0}
    asked = [(job.mode, job.connections) for job in jobs]
    assert asked == [("dense", 1), ("lexical", 1), ("hybrid", 1), ("hybrid", 8), ("hybrid", 32)]


def test_the_cache_is_filled_with_every_query_and_measured_with_the_same_queries(jobs: list[Job]) -> None:
    queries = [f"头痛 {number}" for number in range(10)]
    run = Bench(SERVICE, queries, 0.5, CACHED_URL)
    with pytest.raises(BenchError, match="the cache could not be filled"):  # the recorder gives only one answer
        run.warm_up()
    (filling,) = [job for job in jobs if job.url == CACHED_URL]
    assert (filling.first_number, filling.max_requests, filling.numbered, filling.connections) == (0, 10, False, 1)
    run.run(BARE_URL, rounds=1)
    hits = [job for job in jobs if job.url == CACHED_URL][1:]
    assert [(job.mode, job.numbered, job.timings) for job in hits] == [("hybrid", False, True)]


def test_without_a_caching_service_its_row_is_left_out(jobs: list[Job]) -> None:
    measured = Bench(SERVICE, ["头痛"], 0.5).run(BARE_URL, rounds=1)
    assert CACHED not in {scenario.mode for scenario in measured}
    assert all(job.numbered for job in jobs)


def test_a_scenario_without_a_good_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda job: Measurement(3, 1.0, [], [], {}, {"status 500": 3}))
    with pytest.raises(BenchError, match=r"dense, 1 connections: no good answer \(status 500\)"):
        Bench(SERVICE, ["头痛"], 0.5).warm_up()


def test_queries_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text('{"_id": "a", "text": "头痛"}\n\n{"text": "fever"}\n', encoding="utf-8")
    assert read_queries(file) == ["头痛", "fever"]


@pytest.mark.parametrize("content", [None, b"not json", b'{"query": "x"}', b"[1]", b"\xff\xfe"])
def test_a_file_without_queries_is_reported_in_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "queries.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert main(["--queries", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bench: {file}: give JSON lines")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://192.0.2.7:80"], "http://127.0.0.1:PORT only"),
        (["--collection", "/nowhere"], "/nowhere has no published version; care index build"),
        (["--url", SERVICE, "--rounds", "0"], "--rounds must be at least 1"),
        (["--url", SERVICE, "--seconds", "0"], "--seconds must be above 0"),
        (["--url", SERVICE, "--seconds", "61"], "--seconds must be above 0 and at most 60, not 61"),
    ],
)
def test_bad_arguments_are_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("failures", "status"), [({}, 0), ({"status 503": 1}, 1)])
def test_a_failure_gives_exit_status_1(
    failures: dict[str, int], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_bench", lambda given, facts: report(failures))
    assert main(["--json", str(tmp_path / "bench.json")]) == status
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["rows"][0]["failures"] == failures


def test_the_figures_are_printed_even_if_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_bench", lambda given, facts: report({}))
    assert main(["--json", str(tmp_path / "nowhere" / "bench.json")]) == 1
    printed = capsys.readouterr()
    assert "| bare framework | 1 | 1 (1–1) |" in printed.out
    assert "cannot be written (No such file or directory)" in printed.err


def report(failures: dict[str, int]) -> Report:
    return make_report({}, {Scenario(BARE, 1): [Measurement(1, 1.0, [1.0], [10], {}, failures)]})


def test_the_facts_name_commit_machine_and_versions() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,}( with uncommitted changes)?|unknown \(not a git checkout\)", machine.commit())
    assert re.search(r", \d+ cores, \w+, load average \d+\.\d before the run$", machine.machine())
    assert re.match(r"Python 3\.\d+\.\d+, onnxruntime(-gpu)? \d\S+, faiss-\S+ \d", machine.versions())


def test_settings_are_listed_without_secrets() -> None:
    environment = {"CARE_THREADS": "1", "CARE_ADMIN_TOKEN": "secret", "HOME": "x", "CARE_LRU_MB": "0"}
    assert machine.settings(environment) == "CARE_LRU_MB=0, CARE_THREADS=1"


def test_the_example_queries_exist() -> None:
    assert len(read_queries(QUERIES)) == 100

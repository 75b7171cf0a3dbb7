"""The load test as an operator runs it: the real service, the real Locust, and its limits."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.build import build
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from tests.e2e.server import ENCODER, REPOSITORY, Server

EVERY = 16
SEARCHES = {"search hybrid", "search dense", "search filtered", "search by URL"}


@pytest.fixture(scope="module")
def entries() -> list[dict[str, str]]:
    """Returns short entries of every kind and language from the example corpus."""
    lines = (REPOSITORY / "examples/corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if len(line) < 1000][::EVERY]


@pytest.fixture(scope="module")
def server(entries: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("loadtest")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    collection = Collection(folder / "collection")
    collection.publish(build([corpus], OnnxEncoder.load(ENCODER, threads=1), collection).version)
    running = Server(collection.root)
    running.start()
    yield running
    running.stop()


def locust(*arguments: str, file: str = "loadtest/locustfile.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", file, "--headless", "--only-summary"]
    # Locust reads settings from the environment or a file; the test has none.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    return subprocess.run([*command, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def load(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs long enough for a search, also on a busy machine."""
    for seconds in (2, 8, 64):
        run = locust(*arguments, "-u", "6", "-r", "6", "-t", f"{seconds}s")
        if "SLO not judged" not in run.stderr:
            break
    return run


def test_a_load_test_measures_checks_answers_and_applies_its_limits(
    server: Server, entries: list[dict[str, str]], tmp_path: Path
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text("".join(json.dumps({"text": entry["title"]}) + "\n" for entry in entries), encoding="utf-8")
    options = ("--host", server.url, "--queries", str(queries))
    run = load(*options, "--p95-ms", "60000", "--p99-ms", "60000", "--csv", str(tmp_path / "deep" / "run"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "\nSLO met: " in f"\n{run.stdout}"

    stats = tmp_path / "deep" / "run_stats.csv"
    with stats.open(encoding="utf-8") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    total = rows.pop("Aggregated")
    assert int(total["Request Count"]) == sum(int(row["Request Count"]) for row in rows.values()) > 0
    assert int(total["Failure Count"]) == 0
    assert rows.keys() & SEARCHES
    assert rows.keys() >= {"collection"}
    # The printed table and the file end with the same request.
    assert f"Aggregated {total['Request Count']} " in " ".join(run.stdout.split() + run.stderr.split())

    missed = load(*options, "--p95-ms", "0.001")
    assert missed.returncode == 1
    assert "SLO" not in missed.stdout
    assert "\nSLO missed: p95 of search" in f"\n{missed.stderr}"


def test_steps_end_after_the_knee_with_a_report_and_a_picture(
    server: Server, entries: list[dict[str, str]], tmp_path: Path
) -> None:
    queries, picture, page = tmp_path / "queries.jsonl", tmp_path / "steps.png", tmp_path / "steps.html"
    queries.write_text("".join(json.dumps({"text": entry["title"]}) + "\n" for entry in entries), encoding="utf-8")
    given = ("--host", server.url, "--queries", str(queries), "--picture", str(picture), "--html", str(page))
    steps = ("--step-seconds", "3", "--step-users", "3", "--most-users", "6", "--p95-ms", "60000")
    run = locust(*given, *steps, "--refused", "1", file="loadtest/steps.py")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if " users: " in line] == ["3 users", "6 users", "knee"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<html" in page.read_text(encoding="utf-8")


def test_a_run_fails_if_the_service_does_not_answer(tmp_path: Path) -> None:
    run = locust("-u", "2", "-r", "2", "-t", "2s", "--host", "http://127.0.0.1:1", "--csv", str(tmp_path / "run"))
    assert run.returncode == 1
    verdict = [line for line in run.stderr.splitlines() if line.startswith("SLO ")]
    assert len(verdict) == 1
    assert verdict[0].startswith(("SLO missed: errors ", "SLO missed: p9", "SLO not judged: "))


def test_a_file_without_queries_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    run = locust("-t", "1s", "--host", "http://127.0.0.1:1", "--queries", str(tmp_path / "none.jsonl"))
    assert run.returncode == 1
    assert "none.jsonl has no query" in run.stderr

"""The load test as an operator runs it: the real service, the real Locust, and the judge on what it wrote."""

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
from models.onnx_encoder import OnnxEncoder
from tests.e2e.server import ENCODER, REPOSITORY, Server

EVERY = 16
SEARCHES = {"search hybrid", "search dense", "search filtered", "search by URL"}


@pytest.fixture(scope="module")
def entries() -> list[dict[str, str]]:
    """Short entries of every kind and language, out of the example corpus."""
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


def locust(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    # Locust's own settings may come from the environment or a file: the test has none.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    return subprocess.run([*command, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def slo(stats: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "loadtest/slo.py", str(stats), *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_a_load_test_measures_checks_and_is_judged(
    server: Server, entries: list[dict[str, str]], tmp_path: Path
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text("".join(json.dumps({"text": entry["title"]}) + "\n" for entry in entries), encoding="utf-8")
    options = ("-u", "6", "-r", "6", "-t", "5s", "--host", server.url)
    run = locust(*options, "--queries", str(queries), "--csv", str(tmp_path / "deep" / "run"))
    assert run.returncode == 0, run.stdout + run.stderr

    stats = tmp_path / "deep" / "run_stats.csv"
    with stats.open(encoding="utf-8") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    total = rows.pop("Aggregated")
    assert int(total["Request Count"]) == sum(int(row["Request Count"]) for row in rows.values()) > 0
    assert int(total["Failure Count"]) == 0
    assert rows.keys() & SEARCHES
    assert rows.keys() >= {"collection"}
    # The table on the screen and the file end with the same request.
    assert f"Aggregated {total['Request Count']} " in " ".join(run.stdout.split() + run.stderr.split())

    met = slo(stats, "--p95-ms", "60000", "--p99-ms", "60000")
    assert (met.returncode, met.stdout[:7]) == (0, "SLO met"), met.stderr
    missed = slo(stats, "--p95-ms", "0")
    assert (missed.returncode, missed.stdout) == (1, "")
    assert missed.stderr.startswith("SLO missed: p95 of search")


def test_a_service_that_does_not_answer_is_a_failed_run(tmp_path: Path) -> None:
    run = locust("-u", "2", "-r", "2", "-t", "2s", "--host", "http://127.0.0.1:1", "--csv", str(tmp_path / "run"))
    assert run.returncode == 1
    missed = slo(tmp_path / "run_stats.csv")
    assert missed.returncode == 1
    assert missed.stderr.count("\n") == 1


def test_a_file_without_queries_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    run = locust("-t", "1s", "--host", "http://127.0.0.1:1", "--queries", str(tmp_path / "none.jsonl"))
    assert run.returncode == 1
    assert "none.jsonl has no query" in run.stderr

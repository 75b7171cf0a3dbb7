"""The benchmark command against the real service: every row is present and nothing failed. Speed is not checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.bench import SCENARIOS
from loadtest.harness import PATH, BenchError
from loadtest.harness.generator import STAGES, Job, measure
from loadtest.harness.servers import bare_server, care_server, get, running
from models.package import BUNDLED_PAIR
from tests.api.support import PATIENT


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.bench", *arguments]
    environment = os.environ | PATIENT | {"CARE_THREADS": "1", "CARE_ENCODER": str(BUNDLED_PAIR)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)


def test_a_quick_run_has_every_row_and_no_failure(tmp_path: Path, example_collection: Path) -> None:
    file = tmp_path / "bench.json"
    collection = str(example_collection)
    done = call("--collection", collection, "--seconds", "0.3", "--rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text(encoding="utf-8"))
    scenarios = [(scenario.mode, scenario.connections) for scenario in SCENARIOS]
    assert [(row["scenario"]["mode"], row["scenario"]["connections"]) for row in written["rows"]] == scenarios
    assert all(row["failures"] == {} and row["requests"] > 0 for row in written["rows"])
    assert [overhead["mode"] for overhead in written["overheads"]] == ["dense", "lexical", "hybrid"]
    assert written["facts"]["collection"].startswith("400 documents")
    assert "CARE_LRU_MB=0" in written["facts"]["settings"]
    facts, throughput, stages, hits, overheads = (block.splitlines() for block in done.stdout.strip().split("\n\n"))
    assert [line.split(":")[0] for line in facts[:4]] == ["- command", "- commit", "- date", "- machine"]
    assert [tuple(line.strip("| ").split(" | ")[:2]) for line in throughput[2:]] == [(m, str(n)) for m, n in scenarios]
    assert all(line.endswith("| 0 |") for line in throughput[2:])
    own = [(mode, str(connections)) for mode, connections in scenarios if mode != "bare framework"]
    assert [tuple(line.strip("| ").split(" | ")[:2]) for line in stages[2:]] == own
    assert stages[0].strip("| ").split(" | ")[2:] == list(STAGES)
    assert [line.split(" | ")[0] for line in hits[2:]] == ["| process LRU"]
    assert [line.split(" | ")[0] for line in overheads[2:]] == ["| dense", "| lexical", "| hybrid"]


def test_the_bare_framework_answers_with_the_given_size_and_stops(tmp_path: Path) -> None:
    with running(bare_server(1234), tmp_path) as started:
        url = started.url
        measured = measure(Job(url, ["头痛"], "hybrid", 2, 5, max_requests=20, timings=False))
        assert get(url, PATH)[0] == 405
    assert (measured.body_bytes, measured.failures) == ([1234] * 20, {})
    with pytest.raises(ConnectionRefusedError):
        get(url, PATH)


def test_a_service_that_does_not_start_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARE_ENCODER", str(tmp_path / "nothing"))
    with (
        pytest.raises(BenchError, match=re.escape(str(tmp_path / "nothing"))) as caught,
        running(care_server(tmp_path / "collection"), tmp_path),
    ):
        pass
    assert "the service process ended with 1 before it was ready: care serve:" in str(caught.value)


def test_an_unreachable_url_is_reported_in_one_line(tmp_path: Path) -> None:
    with running(bare_server(10), tmp_path) as started:
        url = started.url
    done = call("--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"bench: {url} is not reachable")

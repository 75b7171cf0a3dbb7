"""Writers, builds and rollbacks under random kills lose no acknowledged change; `make kill-writes` does 300 runs."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_no_acknowledged_change_is_lost_and_none_stops_a_build(pytestconfig: pytest.Config) -> None:
    """Runs in a separate process: it forks, and must have no threads."""
    runs, seed = pytestconfig.getoption("--runs"), pytestconfig.getoption("--seed")
    command = [sys.executable, "-m", "tests.support.write_kills", "--runs", str(runs), "--seed", str(1000 + seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * runs)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{runs} runs" in done.stdout

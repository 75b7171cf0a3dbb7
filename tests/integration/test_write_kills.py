"""A few runs of writers, builds and rollbacks under random kills; `make kill-writes` does 300."""

from __future__ import annotations

import subprocess
import sys


def test_no_acknowledged_change_is_lost_and_none_stops_a_build() -> None:
    """In a process of its own: it forks, and must have no threads."""
    command = [sys.executable, "-m", "tests.kill.writes", "--runs", "20", "--seed", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 runs" in done.stdout

"""The knee of a load in steps, and its picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
from pathlib import Path
from loadtest.steps import Step, draw, knee
def step(users, ms, lost=0):
    return Step(users, 10.0, [ms] * 90 + [2 * ms] * 10, 100, lost)
calm, busy, late, refused = step(8, 20.0), step(16, 60.0), step(24, 400.0), step(24, 30.0, lost=2)
assert knee([calm, busy, late], 250) is busy
assert knee([calm, busy, refused, busy], 250) is busy
assert knee([calm, late, busy], 250) is calm
assert knee([late], 250) is None
assert knee([Step(8, 10.0)], 250) is None
assert knee([calm, busy], 250) is busy
assert str(busy) == "16 users: 10.0 requests/s, p50 / p95 / p99 60 / 120 / 120 ms, refused or failed 0"
draw([calm, busy, late], 250, Path(r"{file}"))
"""


def test_the_knee_is_the_last_step_before_the_first_that_does_not_hold(tmp_path: Path) -> None:
    """Runs in a separate process: Locust patches the standard library when it is imported."""
    file = tmp_path / "deep" / "steps.png"
    code = CODE.replace("{file}", str(file))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")

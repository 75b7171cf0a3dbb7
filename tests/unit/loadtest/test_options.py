"""Options of the measuring programs: a value with which nothing would be measured or judged is refused at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from loadtest.lab import chaos, dashboard, gpu, keys, overload, peers, soak

Main = Callable[[Sequence[str]], int]
PEERS = ("--data", "x", "--weights", "x")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--p95-ms", "nan", "'nan' is not a finite number above 0"),
        ("--p99-ms", "0", "'0' is not a finite number above 0"),
        ("--errors", "nan", "'nan' is not a share between 0 and 1"),
        ("--refused", "-0.1", "'-0.1' is not a share between 0 and 1"),
        ("--step-users", "0", "'0' is not a whole number above 0"),
    ],
)
def test_locust_refuses_limits_that_judge_nothing(option: str, value: str, message: str) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/steps.py", "--headless", f"{option}={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"argument {option}: {message}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (chaos.main, ["--connections", "0"]),
        (chaos.main, ["--times", "0"]),
        (dashboard.main, ["--step-seconds", "-1"]),
        (gpu.main, ["--connections", "4", "0"]),
        (keys.main, ["--rounds", "0"]),
        (overload.main, ["--seconds", "inf"]),
        (peers.main, [*PEERS, "--rounds", "0"]),
        (peers.main, [*PEERS, "--seconds", "nan"]),
        (soak.main, ["--per-second", "nan"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__module__,
)
def test_programs_refuse_what_measures_nothing(
    main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "above 0" in capsys.readouterr().err.splitlines()[-1]

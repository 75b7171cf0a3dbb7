"""Some faults of `make chaos` under a small load: a real service of several processes, and a real Redis."""

from __future__ import annotations

import os

import pytest

from loadtest.lab import chaos, faults

FAULTS = ["snapshot damaged", "hostile", "Redis frozen", "versions rolled back"]
if os.geteuid() == 0:  # only root may close a socket silently
    FAULTS.append("half-open")


def test_a_service_survives_faults_under_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "CALM_SECONDS", 0.5)  # before each fault
    # A disconnected client keeps its connection for this long, and the test waits for the last one.
    monkeypatch.setattr(faults, "IMPATIENT", dict.fromkeys(faults.IMPATIENT, "4"))
    status = chaos.main([*FAULTS, "--documents", "24", "--connections", "2"])
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    rows = [line for line in shown.out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(FAULTS)

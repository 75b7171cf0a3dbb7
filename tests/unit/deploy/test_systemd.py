"""The systemd unit of the service: its command, settings, stop timeout, and writable paths."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from indexer.command import COLLECTION
from service.processes.supervisor import GRACE_SECONDS
from service.settings import ENV_PREFIX, Settings
from tests.unit.deploy.support import REPOSITORY, parse_care
from tests.unit.deploy.test_schedules import SERVICE as REINDEX
from tests.unit.deploy.test_schedules import unit

NAME = "care-search@.service"
SERVICE = unit(NAME)["Service"]


def settings() -> Settings:
    """Returns the settings of instance 8000."""
    pairs = dict(pair.split("=", 1) for pair in SERVICE["Environment"].replace("%i", "8000").split())
    own = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in pairs.items() if name[:5] == ENV_PREFIX}
    return Settings.model_validate(own)


def test_the_service_serves_what_the_timer_publishes() -> None:
    program, *words = shlex.split(SERVICE["ExecStart"])
    assert program == shlex.split(REINDEX["Service"]["ExecStart"])[0]
    assert parse_care(words).keys() >= {"collection"}
    for same in ("User", "WorkingDirectory", "ReadWritePaths", "ExecStartPre", "EnvironmentFile"):
        assert SERVICE[same] == REINDEX["Service"][same]
    assert SERVICE["ReadWritePaths"] == f"{SERVICE['WorkingDirectory']}/{COLLECTION.parts[0]}"
    assert "ORT_DISABLE_TELEMETRY=1" in SERVICE["Environment"].split()


def test_the_reindex_unit_has_no_more_privileges_than_the_service() -> None:
    kinds = ("NoNew", "Private", "Protect", "Lock", "Restrict", "SystemCall", "Capability")
    limits = {name: value for name, value in SERVICE.items() if name.startswith(kinds)}
    assert len(limits) > 15
    assert limits.items() <= REINDEX["Service"].items()


def test_the_documented_audit_log_is_writable() -> None:
    documented = re.search(r"CARE_AUDIT_LOG=(\S+?)`", (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8"))
    assert documented is not None
    assert Path(documented[1]).parent == Path("/var/log") / SERVICE["LogsDirectory"]


def test_the_instance_name_is_the_port_and_the_stop_timeout_is_long_enough() -> None:
    given = settings()
    assert given.port == 8000
    assert given.drain_seconds > 0
    assert float(SERVICE["TimeoutStopSec"]) > given.drain_seconds + given.shutdown_seconds + GRACE_SECONDS
    assert SERVICE["KillMode"] == "mixed"  # the supervisor ends the workers


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze of a Linux with systemd")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    for path in (REPOSITORY / "deploy/systemd").iterdir():
        # The program is installed on the machine that runs it, not here.
        text = path.read_text(encoding="utf-8").replace("/opt/care/bin/care", "/bin/true")
        (tmp_path / path.name.replace("@", "@8000")).write_text(text, encoding="utf-8")
    units = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

"""The schedules: cron, systemd, Kubernetes and compose run one command, at one time, on existing paths."""

from __future__ import annotations

import configparser
import re
import shlex
from typing import Any

from indexer.command import COLLECTION
from indexer.errors import Busy
from tests.unit.deploy.support import REPOSITORY, compose, instructions, manifest, parse_care

CRON = next(line for line in (REPOSITORY / "deploy/crontab").read_text().splitlines() if line.startswith("17 "))
JOB = manifest("CronJob")
POD: dict[str, Any] = JOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def unit(name: str) -> configparser.ConfigParser:
    """Reads a unit file; systemd's keys are case-sensitive."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(REPOSITORY / "deploy/systemd" / name)
    return parser


SERVICE, TIMER = unit("care-reindex.service"), unit("care-reindex.timer")


def commands() -> dict[str, list[str]]:
    """Returns what each schedule runs, as arguments of `care`."""
    (cron,) = re.findall(r"\bcare (index [^;]+);", CRON)
    program, *systemd = shlex.split(SERVICE["Service"]["ExecStart"])
    assert program.endswith("/care")
    return {
        "cron": shlex.split(cron),
        "systemd": systemd,
        "kubernetes": CONTAINER["args"],
        "compose": compose()["services"]["reindex"]["command"],
    }


def test_every_schedule_runs_the_same_command() -> None:
    given = {name: parse_care(words) for name, words in commands().items()}
    for options in given.values():
        options["corpus"] = [path.name for path in options["corpus"]]  # the folder depends on the machine
    assert all(options == given["cron"] for options in given.values())
    assert (given["cron"]["publish"], given["cron"]["collection"]) == (True, COLLECTION)
    assert given["cron"]["keep"] >= 2


def test_every_schedule_is_due_at_the_same_time() -> None:
    assert CRON.startswith("17 3 * * 0 ")
    assert JOB["spec"]["schedule"] == "17 3 * * 0"
    assert TIMER["Timer"]["OnCalendar"] == "Sun 03:17"


def test_the_timer_starts_the_service() -> None:
    assert "Unit" not in TIMER["Timer"]  # by default it starts the service of its own name
    assert TIMER["Install"]["WantedBy"] == "timers.target"
    assert "Install" not in SERVICE
    assert SERVICE["Service"]["Type"] == "oneshot"


def test_systemd_uses_the_same_folders_as_cron() -> None:
    service = SERVICE["Service"]
    assert f"cd {service['WorkingDirectory']} " in CRON
    assert service["ReadWritePaths"] == f"{service['WorkingDirectory']}/{COLLECTION.parts[0]}"
    assert service["ExecStartPre"].endswith(f" {service['ReadWritePaths']}")  # which must exist when it starts
    assert service["Environment"] == "ORT_DISABLE_TELEMETRY=1"


def test_a_killed_run_is_restarted_and_a_failed_run_is_not() -> None:
    assert SERVICE["Service"]["Restart"] == "on-abnormal"
    spec = JOB["spec"]["jobTemplate"]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert rule["onExitCodes"]["values"] == [1, Busy.exit_code]
    assert spec["backoffLimit"] > 0
    assert POD["restartPolicy"] == "Never"  # required by a pod failure policy


def test_the_job_never_runs_concurrently() -> None:
    assert JOB["spec"]["concurrencyPolicy"] == "Forbid"


def test_the_pod_fits_the_image() -> None:
    (user,) = instructions("service", "USER")
    context = POD["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert CONTAINER["image"] == compose()["services"]["reindex"]["image"]
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    assert f"/app/{COLLECTION}" in instructions("service", "VOLUME")
    assert {f"/app/{COLLECTION}", "/corpus", "/tmp"} == mounts.keys()
    assert mounts["/corpus"]["readOnly"]
    assert {volume["name"] for volume in POD["volumes"]} == {mount["name"] for mount in mounts.values()}
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]


def test_the_pod_has_no_environment_variables_of_other_services() -> None:
    """`CARE_PORT=tcp://…`, of a Service named care, is refused as a setting."""
    assert POD["enableServiceLinks"] is False

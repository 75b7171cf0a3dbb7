"""docker-compose.yml: its names, commands and mounts against the code and the image."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.command import COLLECTION
from service.settings import ENV_PREFIX, Settings
from tests.unit.deploy.support import REPOSITORY, compose, dockerfile, instructions, parse_care

SERVICES: dict[str, dict[str, Any]] = compose()["services"]
OURS = ("service", "reindex")
LASTING = ("service", "redis", "prometheus", "grafana")


def test_the_environment_has_only_settings() -> None:
    given: dict[str, str] = SERVICES["service"]["environment"]
    names = {name.removeprefix(ENV_PREFIX).lower() for name in given}
    assert all(name.startswith(ENV_PREFIX) for name in given)
    assert names <= Settings.model_fields.keys()
    values = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in given.items() if value}
    assert Settings.model_validate(values).redis_url == "redis://redis:6379/0"
    assert not given["CARE_ADMIN_TOKEN"]  # empty unless the operator's environment has one


def test_the_encoder_has_one_thread_per_core_of_the_container() -> None:
    limits = SERVICES["service"]["deploy"]["resources"]["limits"]
    assert SERVICES["service"]["environment"]["CARE_THREADS"] == limits["cpus"]


@pytest.mark.parametrize("name", OURS)
def test_commands_are_valid_care_commands(name: str) -> None:
    assert SERVICES[name]["image"] == SERVICES["service"]["image"]
    parse_care(SERVICES[name]["command"])


def test_the_image_is_built_as_a_target_that_exists() -> None:
    build = SERVICES["service"]["build"]
    assert (REPOSITORY / build["context"] / "Dockerfile").is_file()
    assert build["target"] in {one.stage for one in dockerfile()}


def test_the_job_publishes_what_the_service_serves() -> None:
    job = parse_care(SERVICES["reindex"]["command"])
    assert job["publish"]
    assert job["collection"] == COLLECTION
    mount = f"collection:/app/{COLLECTION}"
    assert all(mount in SERVICES[name]["volumes"] for name in OURS)
    assert f"/app/{COLLECTION}" in instructions("service", "VOLUME")


def test_the_job_reads_the_example_corpus_by_default() -> None:
    (corpus,) = parse_care(SERVICES["reindex"]["command"])["corpus"]
    folder, target, mode = SERVICES["reindex"]["volumes"][1].split(":")
    assert mode == "ro"
    assert str(corpus.parent) == target
    assert (REPOSITORY / folder / corpus.name).is_file()


def test_the_job_runs_only_when_called() -> None:
    assert SERVICES["reindex"]["profiles"]
    assert SERVICES["reindex"]["restart"] == "no"
    assert SERVICES["reindex"]["healthcheck"] == {"disable": True}


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_limits(name: str) -> None:
    assert SERVICES[name]["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}


@pytest.mark.parametrize("name", LASTING)
def test_lasting_services_restart_and_have_a_health_check(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert "healthcheck" in SERVICES[name] or instructions("service", "HEALTHCHECK")


def test_ports_are_open_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert SERVICES["service"]["ports"][0].rpartition(":")[2] in instructions("service", "EXPOSE")


def test_accepted_requests_have_time_to_be_answered() -> None:
    grace = float(SERVICES["service"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["shutdown_seconds"].default


def test_redis_is_a_cache_and_evicts_the_least_used_keys() -> None:
    words: list[str] = SERVICES["redis"]["command"]
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options["--maxmemory-policy"] == "allkeys-lru"
    assert int(options["--maxmemory"].removesuffix("mb")) * 1.25 < _megabytes("redis")
    assert (options["--save"], options["--appendonly"]) == ("", "no")
    assert "volumes" not in SERVICES["redis"]


def test_every_named_volume_and_every_mounted_file_exists() -> None:
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())]
    named = {source for source in mounts if not source.startswith(".")}
    assert named == compose()["volumes"].keys()
    assert all((REPOSITORY / source).exists() for source in mounts if source.startswith("."))


def _megabytes(service: str) -> int:
    return int(SERVICES[service]["deploy"]["resources"]["limits"]["memory"].removesuffix("m"))


def test_host_names_are_checked_and_that_of_prometheus_is_allowed() -> None:
    environment = compose()["services"]["service"]["environment"]
    assert Settings(host="0.0.0.0", allowed_hosts=environment["CARE_ALLOWED_HOSTS"]).host_names == {"service"}
    assert "service:8000" in (REPOSITORY / "deploy/prometheus.yml").read_text(encoding="utf-8")

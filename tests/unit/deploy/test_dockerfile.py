"""The Dockerfile: faults that would break or weaken an image and would show only at run time."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from indexer.command import COLLECTION
from models.package import BUNDLED_ENCODER
from service.settings import ENV_PREFIX, Settings
from tests.support.http_thread import QuietHandler, serving_http
from tests.unit.deploy.support import (
    REPOSITORY,
    copied_sources,
    dockerfile,
    instructions,
    is_ignored,
    locked,
    normalise,
    parse_care,
)

TARGETS = ("service", "gpu")
LOCKS = [("environment", "serve"), ("indexer-environment", "indexer"), ("train-environment", "train"), ("gpu", "gpu")]
TRAINING = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "optimum", "triton")
# Optional extras: large, and not needed by most deployments.
BESIDE_THE_IMAGE = ("qdrant", "parquet", "gpu")
# Modules whose packages are not in this environment.
ELSEWHERE = {"pynvml": ["nvidia-ml-py"]}


@pytest.mark.parametrize("source", sorted(set(copied_sources())))
def test_copied_paths_exist_and_reach_the_builder(source: str) -> None:
    assert (REPOSITORY / source).exists()
    assert not is_ignored(source)


@pytest.mark.parametrize(
    "path", [".git/config", "var/collection/CURRENT", ".venv/bin/python", "tests/conftest.py", "service/__pycache__/x"]
)
def test_other_paths_are_excluded_from_the_build_context(path: str) -> None:
    assert is_ignored(path)


def test_copies_come_from_stages_above() -> None:
    seen: list[str] = []
    for one in dockerfile():
        if one.name == "FROM":
            seen.append(one.stage)
        elif "--from=" in one.rest:
            assert one.rest.split("--from=")[1].split()[0] in seen[:-1]


def test_the_default_target_is_the_service_for_cpus() -> None:
    assert dockerfile()[-1].stage == "service"
    # One base for both: the environment is copied with its link to the interpreter.
    bases = {rest.split(" AS ")[0] for stage in ("environment", "runtime") for rest in instructions(stage, "FROM")}
    assert bases == {"python:3.11-slim"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_user_is_fixed_and_not_root(target: str) -> None:
    (user,) = instructions(target, "USER")
    uid, gid = user.split(":")
    assert min(int(uid), int(gid)) >= 1000
    made = " ".join(instructions(target, "RUN"))
    assert f"--uid {uid} --gid {gid}" in made
    assert re.search(rf"install -d -o {uid} -g {gid} (/app/var )?/app/{COLLECTION}", made)
    after = dockerfile()[[(one.stage, one.name) for one in dockerfile()].index((target, "USER")) :]
    assert not {"RUN", "COPY", "ADD"} & {one.name for one in after if one.stage == target}


@pytest.mark.parametrize("target", TARGETS)
def test_the_default_paths_of_the_commands_are_valid_in_the_image(target: str) -> None:
    assert instructions(target, "WORKDIR") == ["/app"]
    assert instructions(target, "VOLUME") == [f"/app/{COLLECTION}"]
    fields = Settings.model_fields
    assert (fields["collection"].default, fields["encoder"].default) == (COLLECTION, BUNDLED_ENCODER)


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_serves_on_the_port_that_it_exposes(target: str) -> None:
    (given,) = instructions(target, "ENV")
    care = {name: value for name, _, value in (pair.partition("=") for pair in given.split()) if name[:5] == ENV_PREFIX}
    settings = Settings.model_validate({name.removeprefix(ENV_PREFIX).lower(): value for name, value in care.items()})
    assert settings.host == "0.0.0.0"
    assert instructions(target, "EXPOSE") == [str(settings.port)]
    command = json.loads(instructions(target, "ENTRYPOINT")[0]) + json.loads(instructions(target, "CMD")[0])
    assert command[0] == "care"
    parse_care(command[1:])


def test_onnx_runtime_telemetry_is_off() -> None:
    crontab = (REPOSITORY / "deploy/crontab").read_text()
    assert "ORT_DISABLE_TELEMETRY=1\n" in crontab
    for target in TARGETS:
        assert "ORT_DISABLE_TELEMETRY=1" in instructions(target, "ENV")[0].split()


@pytest.fixture
def live_port() -> Iterator[int]:
    """Yields the port of a server that answers only that it is alive."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/livez" else 404)

    with serving_http(Handler) as port:
        yield port


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_detects_a_live_and_a_dead_service(target: str, live_port: int) -> None:
    command = json.loads(instructions(target, "HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[0] == "python"
    for port, alive in ((live_port, True), (1, False)):
        # An inherited proxy must not be used for requests to the container itself.
        environment = os.environ | {"CARE_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
        done = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True)
        assert (done.returncode == 0) is alive


def test_recipes_find_their_files_in_the_training_image() -> None:
    """Recipes name files relative to the repository's root, and write their runs to var."""
    made = " ".join(instructions("train", "RUN"))
    assert "ln -s /opt/care/lib/python3.*/site-packages/models models" in made
    assert re.search(r"install -d -o 10001 -g 10001 /app/var ", made)
    assert "HOME=/app/var" in instructions("train", "ENV")  # the user's own home does not exist


def test_ray_has_a_home_folder_in_the_indexer_image() -> None:
    assert "HOME=/tmp" in instructions("indexer", "ENV")


def test_the_locks_of_all_images_are_audited() -> None:
    installed = set(re.findall(r"-r (?:/locks/)?([a-z]+)\.lock", (REPOSITORY / "Dockerfile").read_text()))
    (audited,) = re.findall(r"^LOCKS := (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert installed == {"serve", "indexer", "train", "gpu"}
    assert installed <= set(audited.split())


def test_no_training_library_or_compiler_is_installed() -> None:
    assert not locked().keys() & set(TRAINING)
    assert not any(name.startswith("nvidia-") for name in locked())
    assert not any("apt-get" in rest or "pip" in rest for rest in instructions("service", "RUN"))


@pytest.mark.parametrize(("stage", "lock"), LOCKS)
def test_everything_is_installed_from_a_lock_by_hash(stage: str, lock: str) -> None:
    install = next(rest for rest in reversed(instructions(stage, "RUN")) if "-r " in rest).partition("&&")[0].strip()
    assert install.endswith(f"{lock}.lock")
    assert {"--require-hashes", "--only-binary"} <= set(install.split())
    assert all("--hash=sha256:" in entry and "==" in entry for entry in locked(lock).values())


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("serve", ["cpu"]), ("gpu", ["gpu"]), ("indexer", ["cpu", "ray", "qdrant"]), ("train", ["cpu", "train", "ray"])],
)
def test_a_lock_has_the_dependencies_of_the_project(lock: str, extras: list[str]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(entry for extra in extras for entry in project["optional-dependencies"][extra]),
    ]
    names = {normalise(re.split(r"[>;\[]", entry)[0]) for entry in wanted}
    assert names - {"care-search"} <= locked(lock).keys()


@pytest.mark.parametrize("lock", ["indexer", "train"])
def test_packages_shared_by_images_have_the_same_version(lock: str) -> None:
    ours, theirs = locked(), locked(lock)
    versions = {name: (ours[name].split()[0], theirs[name].split()[0]) for name in ours.keys() & theirs.keys()}
    assert {name: pair for name, pair in versions.items() if len(set(pair)) > 1} == {}


def test_the_lock_has_every_package_that_the_service_and_the_indexer_import() -> None:
    files = [path for room in ("service", "indexer") for path in (REPOSITORY / room).rglob("*.py")]
    modules = {name.partition(".")[0] for path in files for name in _imports(path)}
    foreign = modules - {"models", "indexer", "service"} - set(sys.stdlib_module_names)
    sources = ELSEWHERE | dict(packages_distributions())
    names = {module: {normalise(source) for source in sources.get(module, [module])} for module in foreign}
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    beside = {normalise(entry.split(">")[0]) for extra in BESIDE_THE_IMAGE for entry in extras[extra]}
    assert {module for module in foreign if not names[module] & (locked().keys() | beside)} == set()


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module

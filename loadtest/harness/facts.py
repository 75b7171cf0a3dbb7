"""What a published number must carry: the commit, the machine and the versions. Reads, measures nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from loadtest.harness.client import REPOSITORY

# Each line: builds of one library under different names, of which one is installed.
PACKAGES = (
    # Where both builds are installed, the one that the bench's own path puts first is a card's.
    ("onnxruntime-gpu", "onnxruntime"),
    ("faiss-gpu-cuvs", "faiss-gpu", "faiss-cpu"),
    ("fastapi",),
    ("uvicorn",),
    ("uvloop",),
    ("httptools",),
)
SECRETS = {"CARE_ADMIN_TOKEN", "CARE_REDIS_KEY"}


def commit() -> str:
    """The short hash, and whether the files are what it names."""
    name = _output("git", "rev-parse", "--short", "HEAD")
    if not name:
        return "unknown (not a git checkout)"
    return f"{name} with uncommitted changes" if _output("git", "status", "--porcelain") else name


def machine() -> str:
    """Model and number of the processors that this process may use, and how busy they are with other things."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.machine()}, load average {os.getloadavg()[0]:.1f} before the run"


def versions() -> str:
    known = [f"Python {platform.python_version()}"]
    for names in PACKAGES:
        found = [f"{name} {number}" for name in names if (number := _version(name))]
        known.append(found[0] if found else f"{names[0]} absent")
    return ", ".join(known)


def settings(environment: Mapping[str, str]) -> str:
    """The service's settings that differ from its defaults: names and values of `CARE_…`, secrets left out."""
    own = {name: value for name, value in environment.items() if name.startswith("CARE_") and name not in SECRETS}
    return ", ".join(f"{name}={value}" for name, value in sorted(own.items()))


def _processor() -> str:
    if shutil.which("lscpu"):
        for line in _output("lscpu").splitlines():
            name, _, value = line.partition(":")
            if name == "Model name" and value.strip() not in {"", "-"}:
                return value.strip()
    return platform.processor() or "unknown processor"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command prints, in English; nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

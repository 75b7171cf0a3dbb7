"""Builds a target of the Dockerfile without a container engine, measures it and starts it (`make image`).

  python -m tests.support.rootfs service --folder /var/tmp/care-image

Each stage is a folder, and each instruction is carried out as it stands: RUN in a chroot, COPY by copying. In place of
python:3.11-slim there is a minimal Debian 12 with its own Python 3.11 (debootstrap). Needs root, and not for `gpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.unit.deploy.support import REPOSITORY, dockerfile, instructions, is_ignored

BASE = "python:3.11-slim"
PACKAGES = "ca-certificates,python3.11-minimal,python3.11,python3.11-venv,python3-pip"
# Needed to build, not by an image: what Debian's packages leave behind.
LEFTOVERS = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
READY_SECONDS = 120


def make_base(folder: Path) -> None:
    mirror = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder), mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3.11")
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
    shutil.copy("/etc/hosts", folder / "etc/hosts")
    with contextlib.suppress(OSError):  # a network whose certificates are its own
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", folder / "etc/ssl/certs/ca-certificates.crt")
    for name in LEFTOVERS:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)


def build(stage: str, folder: Path) -> Path:
    """The root folder of a stage, built with everything that it needs unless it is there already."""
    root = folder / stage
    if root.exists():
        return root
    steps = [one for one in dockerfile() if one.stage == stage]
    base = folder / "base" if (name := steps[0].rest.split(" AS ")[0]) == BASE else build(name, folder)
    if not base.exists():
        make_base(base)
    partial = folder / f"{stage}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(partial)], check=True)
    place = (instructions(name, "WORKDIR") or ["/"])[-1] if name != BASE else "/"
    for step in steps[1:]:
        if step.name == "WORKDIR":
            place = step.rest
            (partial / place[1:]).mkdir(parents=True, exist_ok=True)
        elif step.name == "RUN":
            print(f"{stage}: {step.rest[:100]}", flush=True)
            subprocess.run(
                ["chroot", str(partial), "sh", "-ec", f"cd {place} && {step.rest}"], check=True, env=_environment()
            )
        elif step.name == "COPY":
            _copy(step.rest, partial, place, folder)
    partial.rename(root)
    return root


def _copy(rest: str, root: Path, place: str, folder: Path) -> None:
    origin = re.match(r"--from=(\S+) ", rest)
    *sources, target = rest.split()[1 if origin else 0 :]
    to = root / (Path(place) / target).relative_to("/")
    for source in sources:
        found = build(origin[1], folder) / source[1:] if origin else REPOSITORY / source
        if found.is_dir():
            shutil.copytree(found, to, symlinks=True, dirs_exist_ok=True, ignore=None if origin else _ignored)
        else:
            to.mkdir(parents=True, exist_ok=True) if target.endswith("/") else to.parent.mkdir(
                parents=True, exist_ok=True
            )
            shutil.copy(found, to)


def _ignored(folder: str, names: list[str]) -> set[str]:
    inside = Path(folder).relative_to(REPOSITORY)
    return {name for name in names if is_ignored((inside / name).as_posix())}


def _environment() -> dict[str, str]:
    """The path of an image; beside it only what says how to reach the network."""
    kept = {name: value for name, value in os.environ.items() if re.search(r"proxy|^PIP_INDEX|^PIP_CERT", name, re.I)}
    return kept | {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}


def megabytes(root: Path) -> float:
    return int(subprocess.check_output(["du", "--summarize", "--bytes", str(root)]).split()[0]) / 1e6


@contextlib.contextmanager
def started(root: Path, stage: str) -> Iterator[str]:
    """The image's own command as its own user, in the chroot; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = _as_image(root, stage, json.loads(instructions(stage, "CMD")[-1]))
    process = subprocess.Popen(run, env=_image_environment(stage) | {"CARE_HOST": "127.0.0.1", "CARE_PORT": str(port)})
    try:
        give_up = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the image's service is not ready; it ended with {process.poll()}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _as_image(root: Path, stage: str, words: list[str]) -> list[str]:
    user, entry = instructions(stage, "USER")[-1], json.loads(instructions(stage, "ENTRYPOINT")[-1])
    enter = f'cd {instructions(stage, "WORKDIR")[-1]} && exec "$@"'
    return ["chroot", f"--userspec={user}", str(root), "sh", "-ec", enter, "sh", *entry, *words]


def _image_environment(stage: str) -> dict[str, str]:
    pairs = (pair.split("=", 1) for pair in instructions(stage, "ENV")[-1].split())
    path = _environment()["PATH"]
    return {name: value.replace("$PATH", path) for name, value in pairs} | {"LANG": "C.UTF-8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["service", "indexer", "train"])
    parser.add_argument("--folder", type=Path, required=True, help="takes the stages, some GB; kept for the next time")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    root = build(given.stage, given.folder)
    base, own = megabytes(given.folder / "base"), megabytes(root)
    print(f"{given.stage}: {own:.0f} MB, of which {base:.0f} MB are the base's Debian and Python")
    if given.stage == "service":
        index = _as_image(root, "service", ["index", "build", "examples/corpus.jsonl", "--publish"])
        subprocess.run(index, env=_image_environment("service"), check=True)
        with started(root, "service") as url, urllib.request.urlopen(f"{url}/v1/search?q=aspirin&top_k=1") as answer:
            print("a search in it:", json.loads(answer.read())["results"][0]["hits"][0]["id"])
    else:
        subprocess.run(_as_image(root, given.stage, ["--version"]), env=_image_environment(given.stage), check=True)


if __name__ == "__main__":
    main()

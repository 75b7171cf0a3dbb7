"""Builds a target of the Dockerfile without a container engine, measures it and starts it (`make image`).

  python -m tests.support.rootfs service --folder /var/tmp/care-image

Each stage is a folder, and each instruction is executed: RUN in a chroot, COPY by copying. Instead of
python:3.11-slim it uses a minimal Debian 12 with its own Python 3.11, instead of NVIDIA's image a minimal Ubuntu
24.04 for x86_64 without CUDA (debootstrap). Needs root; `gpu` on another processor also needs qemu-user-static.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from loadtest.harness.servers import free_port
from tests.unit.deploy.support import REPOSITORY, dockerfile, instructions, is_ignored

DEBIAN = "ca-certificates,python3.11-minimal,python3.11,python3.11-venv,python3-pip"
# What debootstrap makes instead of an image: its arguments, the release and its mirror.
BASES = {
    "python:3.11-slim": ([f"--include={DEBIAN}"], "bookworm", "http://deb.debian.org/debian"),
    "nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04": (
        ["--arch=amd64", "--include=ca-certificates", "--components=main,universe"],
        "noble",
        "http://archive.ubuntu.com/ubuntu",
    ),
}
# An older debootstrap has no script for a newer release; Ubuntu's scripts are all alike.
SCRIPTS = Path("/usr/share/debootstrap/scripts")
# Left by Debian's packages; needed to build, but not in an image.
LEFTOVERS = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
# Commands run in each image; those that serve are started afterwards and get a search.
INDEX = ["index", "build", "examples/corpus.jsonl", "--publish"]
TRIALS = {
    "service": INDEX,
    "indexer": [*INDEX, "--ray", "local"],
    "train": ["train", "models/training/recipes/tiny.toml", "--dry-run"],
    "gpu": INDEX,
}
READY_SECONDS = 300


def make_base(image: str, folder: Path) -> None:
    arguments, release, mirror = BASES[image]
    script = SCRIPTS / (release if (SCRIPTS / release).exists() else "jammy")
    command = ["debootstrap", "--variant=minbase", *arguments, release, str(folder), mirror, str(script)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if release == "bookworm":
        (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3.11")
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
    shutil.copy("/etc/hosts", folder / "etc/hosts")
    with contextlib.suppress(OSError):  # a network with its own certificates
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", folder / "etc/ssl/certs/ca-certificates.crt")
    for name in LEFTOVERS:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)


def build(stage: str, folder: Path) -> Path:
    """Returns the root folder of a stage; builds it and all that it needs unless it exists."""
    root = folder / stage
    if root.exists():
        return root
    steps = [one for one in dockerfile() if one.stage == stage]
    name = _origin(stage)
    base = base_of(stage, folder) if name in BASES else build(name, folder)
    if not base.exists():
        make_base(name, base)
    partial = folder / f"{stage}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(partial)], check=True)
    place = "/" if name in BASES else (instructions(name, "WORKDIR") or ["/"])[-1]
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


def base_of(stage: str, folder: Path) -> Path:
    """Returns the folder of the base system of a stage."""
    name = _origin(stage)
    return folder / f"base-{BASES[name][1]}" if name in BASES else base_of(name, folder)


def _origin(stage: str) -> str:
    return next(one.rest.split(" AS ")[0] for one in dockerfile() if one.stage == stage)


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
    """Returns the path of an image, and the variables needed to reach the network."""
    kept = {name: value for name, value in os.environ.items() if re.search(r"proxy|^PIP_INDEX|^PIP_CERT", name, re.I)}
    return kept | {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}


def megabytes(root: Path) -> float:
    return int(subprocess.check_output(["du", "--summarize", "--bytes", str(root)]).split()[0]) / 1e6


@contextlib.contextmanager
def started(root: Path, stage: str) -> Iterator[str]:
    """Runs the image's command as its user, in the chroot; yields its address."""
    port = free_port()
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
    place = instructions(stage, "WORKDIR")[-1]
    enter = f"mount -t proc proc {root}/proc; mount --rbind /sys {root}/sys; mount --rbind /dev {root}/dev; "
    enter += f'exec chroot --userspec={user} {root} sh -ec \'cd {place} && exec "$@"\' sh "$@"'
    # Separate mounts, as in a container: without /sys ONNX Runtime does not recognise the CPU and is slow.
    return ["unshare", "--mount", "sh", "-ec", enter, "sh", *entry, *words]


def _image_environment(stage: str) -> dict[str, str]:
    pairs = (pair.split("=", 1) for line in instructions(stage, "ENV") for pair in line.split())
    path = _environment()["PATH"]
    return {name: value.replace("$PATH", path) for name, value in pairs} | {"LANG": "C.UTF-8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(TRIALS))
    parser.add_argument("--folder", type=Path, required=True, help="takes the stages, some GB; kept for the next time")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    stage, root = given.stage, build(given.stage, given.folder)
    print(f"{stage}: {megabytes(root):.0f} MB, of which {megabytes(base_of(stage, given.folder)):.0f} MB are the base")
    subprocess.run(_as_image(root, stage, TRIALS[stage]), env=_image_environment(stage), check=True)
    if instructions(stage, "EXPOSE"):
        with started(root, stage) as url, urllib.request.urlopen(f"{url}/v1/search?q=aspirin&top_k=1") as answer:
            print("a search in it:", json.loads(answer.read())["results"][0]["hits"][0]["id"])


if __name__ == "__main__":
    main()

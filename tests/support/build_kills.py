"""Kills a build with SIGKILL at random moments and restarts it: the result must equal that of an undisturbed build.

Half of the kills come at a random time of the work, half right after a random file appears, so that short stages are
hit as often as long ones. Equal means that the manifests name the same content (docs/index-format.md).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexer.store.collection import Collection
from indexer.versions import verify
from models.encoder.spec import sha256_of

EXAMPLES = Path("examples/corpus.jsonl")
LIMIT_SECONDS = 300.0
POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Build:
    """How to start the build of one corpus into a collection; at most `shard` texts are lost by a kill."""

    corpus: Path
    shard: int
    fast: bool

    def command(self, collection: Path) -> list[str]:
        if self.fast:
            return [
                sys.executable,
                "-m",
                "tests.support.fast_build",
                str(self.corpus),
                str(collection),
                str(self.shard),
            ]
        options = ["--collection", str(collection), "--shard", str(self.shard), "--publish"]
        return [sys.executable, "cli.py", "index", "build", str(self.corpus), *options]

    def run(self, collection: Path) -> int:
        """Runs the build to its end; returns how many texts were encoded."""
        done = subprocess.run(self.command(collection), capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode != 0:
            raise AssertionError(f"the build ended with {done.returncode}: {done.stderr}")
        (encoded,) = re.findall(r"(\d+) encoded", done.stdout)
        return int(encoded)


@dataclass(frozen=True)
class Kill:
    """One kill: the stage it hit and the outcome."""

    stage: str
    kept: int
    encoded: int
    identical: bool
    left: list[str]


@dataclass(frozen=True)
class Undisturbed:
    """A build without a kill: its content, which every other must equal, its duration and its number of files."""

    content: str
    encoded: int
    seconds: float
    files: int


def run_undisturbed(build: Build, root: Path) -> Undisturbed:
    process = _start(build, root)
    seen: set[str] = set()
    _wait(lambda: process.poll() is not None or (root / "LOCK").exists())
    began = time.monotonic()
    _wait(lambda: seen.update(_paths(root)) or process.poll() is not None)
    seconds = time.monotonic() - began
    process.communicate()
    if process.returncode != 0:
        raise AssertionError(f"the undisturbed build ended with {process.returncode}")
    return Undisturbed(_content(root), _texts(root), seconds, len(seen))


def run_killed(build: Build, root: Path, whole: Undisturbed, generator: random.Random) -> Kill:
    """Runs one build that is killed once and then resumed to its end."""
    process = _start(build, root)
    _wait(lambda: process.poll() is not None or (root / "LOCK").exists())
    if generator.random() < 0.5:
        end = time.monotonic() + generator.uniform(0, whole.seconds)
        _wait(lambda: time.monotonic() >= end or process.poll() is not None)
    else:
        seen: set[str] = set()
        wanted = generator.randint(1, whole.files)
        _wait(lambda: seen.update(_paths(root)) or len(seen) >= wanted or process.poll() is not None)
    process.kill()
    process.communicate()
    stage, kept = _stage(root), _kept(root)
    encoded = build.run(root)
    left = sorted(path.name for path in (root / "versions").iterdir() if path.name.startswith("."))
    return Kill(stage, kept, encoded, _content(root) == whole.content, left)


def run_kills(build: Build, kills: int, seed: int, folder: Path) -> tuple[Undisturbed, list[Kill]]:
    whole = run_undisturbed(build, folder / "undisturbed")
    results = []
    for number in range(kills):
        root = folder / f"kill-{number}"
        results.append(run_killed(build, root, whole, random.Random(f"{seed}-{number}")))
        shutil.rmtree(root)
    return whole, results


def problems(whole: Undisturbed, kills: Sequence[Kill]) -> list[str]:
    """Lists what must never happen: another result, finished work repeated, leftover files."""
    found = []
    for number, kill in enumerate(kills):
        if not kill.identical:
            found.append(f"kill {number} ({kill.stage}): another result")
        if kill.encoded != whole.encoded - kill.kept:
            found.append(f"kill {number} ({kill.stage}): {kill.kept} texts were safe, {kill.encoded} encoded again")
        if kill.left:
            found.append(f"kill {number} ({kill.stage}): left {', '.join(kill.left)}")
    return found


def _start(build: Build, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(build.command(root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("the build took too long")
        time.sleep(POLL_SECONDS)


def _paths(root: Path) -> set[str]:
    return {os.path.join(folder, name) for folder, _, files in os.walk(root) for name in files}


def _stage(root: Path) -> str:
    """Returns how far the build had come."""
    building = next(iter(root.glob("versions/.building-*")), root / "none")
    evidence = {
        "published": root / "CURRENT",
        "built": next(iter(root.glob("versions/2*/manifest.json")), root / "none"),
        "finishing": building / "manifest.json",
        "words": building / "lexical",
        "vectors": building / "vectors.npy",
        "encoding": root / "shards",
        "reading": building / "documents.bin",
    }
    return next((stage for stage, path in evidence.items() if path.exists()), "starting")


def _kept(root: Path) -> int:
    """Counts texts whose vectors are safe: those of a finished version, or of whole shards."""
    if _stage(root) in ("published", "built"):
        return _texts(root)
    shards = [path for path in root.glob("shards/*/*.npy") if sha256_of(path) == path.stem]
    return sum(len(np.load(path, mmap_mode="r")) for path in shards)


def _texts(root: Path) -> int:
    """Counts distinct contents of the newest version."""
    collection = Collection(root)
    hashes = np.load(collection.folder(collection.versions()[-1]) / "hashes.npy")
    return len(np.unique(hashes, axis=0))


def _content(root: Path) -> str:
    """Returns the content of the served version, after comparing every checksum."""
    if Collection(root).current() is None:
        raise AssertionError(f"{root} serves nothing")
    return verify(Collection(root)).content


def summary(whole: Undisturbed, kills: Sequence[Kill]) -> str:
    stages = ", ".join(f"{count} {stage}" for stage, count in Counter(kill.stage for kill in kills).most_common())
    return (
        f"undisturbed: {whole.encoded} texts encoded in {whole.seconds:.1f} s, content {whole.content[:16]}\n"
        f"{len(kills)} kills ({stages}): {sum(kill.identical for kill in kills)} identical results"
    )

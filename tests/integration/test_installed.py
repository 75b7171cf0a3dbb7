"""An installed wheel in an empty folder: the defaults build, serve and search without the checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.deploy.support import REPOSITORY

READY = re.compile(r"CARE Search is ready at (\S+) .*\n")
CARE = "import sys, cli; sys.exit(cli.main())"
SOURCES = ("cli.py", "pyproject.toml", "README.md", "LICENSE", "models", "indexer", "service", "loadtest", "clients")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the wheel of this checkout into a folder; built from a copy, as setuptools writes beside the sources."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    for name in (*SOURCES, "examples"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(
                REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(REPOSITORY / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return target


def environment(installed: Path, **own: str) -> dict[str, str]:
    """Returns an environment without settings, with the installed packages before those of the checkout."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("CARE_")}
    return plain | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"} | own


def care(installed: Path, folder: Path, *arguments: str, **own: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CARE, *arguments],
        cwd=folder, env=environment(installed, **own), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(installed: Path, folder: Path) -> Iterator[str]:
    """Yields the address of a service started in the folder."""
    command = [sys.executable, "-c", CARE, "serve", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(installed), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = READY.match(process.stdout.readline())
        assert ready, process.communicate()
        yield ready[1]
    finally:
        process.terminate()
        process.communicate()


def found(address: str, query: str) -> str:
    """Returns the id of the first hit."""
    request = urllib.request.Request(f"{address}/v1/search", json.dumps({"query": query, "top_k": 1}).encode())
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["results"][0]["hits"][0]["id"])


def test_the_code_of_the_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    script = "import models, cli; print(models.__file__, cli.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(installed), capture_output=True, text=True
    )
    assert all(path.startswith(str(installed)) for path in done.stdout.split())


def test_an_empty_folder_is_enough_to_build_serve_and_search(installed: Path, tmp_path: Path) -> None:
    """Uses the exact command of the crontab, which the other schedules share."""
    rows = [{"_id": "fever", "text": "布洛芬用于退热。"}, {"_id": "blood", "text": "氨氯地平降血压。"}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (arguments,) = re.findall(r"\bcare (index [^;]+);", (REPOSITORY / "deploy/crontab").read_text())
    assert care(installed, tmp_path, *shlex.split(arguments)).startswith("published ")
    with serving(installed, tmp_path) as address:
        assert found(address, "血压高吃什么药") == "blood"


def test_the_demo_includes_its_corpus(installed: Path, tmp_path: Path) -> None:
    script = "from indexer.command import EXAMPLE_CORPUS; print(EXAMPLE_CORPUS)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(installed), capture_output=True, text=True
    )
    corpus = Path(done.stdout.strip())
    assert corpus.is_relative_to(installed)
    for name in ("corpus.jsonl", "page.json"):
        assert corpus.with_name(name).read_bytes() == (REPOSITORY / "examples" / name).read_bytes()


def test_the_index_reads_the_variables_of_the_service(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "1", "text": "高血压"}))
    shutil.copytree(installed / "models/pretrained/care-small-zh", tmp_path / "encoder")
    own = {"CARE_ENCODER": "encoder", "CARE_COLLECTION": "elsewhere"}
    care(installed, tmp_path, "index", "build", "corpus.jsonl", "--publish", **own)
    assert "1 documents" in care(installed, tmp_path, "index", "list", **own)
    assert (tmp_path / "elsewhere" / "CURRENT").is_file()
    missing = subprocess.run(
        [sys.executable, "-c", CARE, "index", "build", "corpus.jsonl"],
        cwd=tmp_path, env=environment(installed, CARE_ENCODER="gone"), capture_output=True, text=True,
    )  # fmt: skip
    assert "gone is not an encoder folder" in missing.stderr

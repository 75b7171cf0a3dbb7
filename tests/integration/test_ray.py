"""Builds on a real Ray cluster of two nodes equal those of one process, even if processes or nodes die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.build import build
from indexer.store.collection import Collection
from indexer.versions import verify
from tests.support.fast_encoder import FastEncoder
from tests.support.ray_build import OPTIONS, until
from tests.support.ray_nodes import Nodes, two_nodes

EXAMPLES = Path("examples/corpus.jsonl")
LIMIT_SECONDS = 240.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as running:
        yield running


def write_corpus(folder: Path, documents: int) -> Path:
    path = folder / "corpus.jsonl"
    path.write_bytes(b"".join(EXAMPLES.read_bytes().splitlines(keepends=True)[:documents]))
    return path


def content(root: Path) -> str:
    return verify(Collection(root)).content


def care(corpus: Path, root: Path, nodes: Nodes, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["--collection", str(root), "--shard", "4", "--threads", "1", "--publish", *options]
    command = [sys.executable, "cli.py", "index", "build", str(corpus), *words]
    return subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def test_the_command_on_a_cluster_builds_the_same_version_as_in_one_process(nodes: Nodes, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, 24)
    assert care(corpus, tmp_path / "one", nodes).returncode == 0
    done = care(corpus, tmp_path / "two", nodes, "--ray", nodes.address, "--shards", f"file://{tmp_path}/shards")
    assert done.returncode == 0, done.stderr
    assert (done.stdout[:10], done.stdout.count("\n")) == ("published ", 1)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert [path for path in (tmp_path / "shards").rglob("*") if path.is_file()] == []


def test_both_nodes_work_and_a_death_does_not_change_the_result(nodes: Nodes, tmp_path: Path) -> None:
    """A process kills itself within a shard; then a whole node is lost while both work."""
    corpus = write_corpus(tmp_path, 24)
    watch = tmp_path / "watch"
    watch.mkdir()
    for sign in ("die", "wait"):
        (watch / sign).touch()
    command = [sys.executable, "-m", "tests.support.ray_build", str(corpus), str(tmp_path / "two"), nodes.address]
    with subprocess.Popen(
        [*command, str(watch)], env=nodes.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as building:
        try:
            until(lambda: building.poll() is not None or not (watch / "die").exists())
            assert len(list(watch.glob("node-*"))) == 2
            nodes.lose_one()
            (watch / "wait").unlink()
            out, err = building.communicate(timeout=LIMIT_SECONDS)
        finally:
            building.kill()
    assert building.returncode == 0, err
    one = Collection(tmp_path / "one")
    summary = build([corpus], FastEncoder(remember=False, swayed=True), one, OPTIONS)
    assert out == f"{summary.encoded} encoded\n"
    assert content(tmp_path / "two") == verify(one, summary.version).content

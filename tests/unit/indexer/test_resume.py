"""Interrupted builds resume, and never leave half a version behind."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, BuildSummary, build
from indexer.store.collection import Collection
from indexer.store.kinds import IndexKind
from indexer.versions import verify
from tests.support.fast_encoder import FailingEncoder, FastEncoder
from tests.unit.indexer.support import write_lines

TEXTS = 20
SHARD = 3


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "c.jsonl", *({"_id": str(n), "text": f"第{n}种药的用法"} for n in range(TEXTS)))


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return Collection(tmp_path / "collection")


def run(corpus: Path, collection: Collection, encoder: FastEncoder | None = None) -> tuple[BuildSummary, list[str]]:
    encoder = encoder or FastEncoder(swayed=True)
    return build([corpus], encoder, collection, BuildOptions(shard_texts=SHARD)), encoder.texts


def interrupt(corpus: Path, collection: Collection, shards: int) -> list[Path]:
    """Runs a build that dies after this number of shards; returns their files."""
    encoder = FailingEncoder(shards)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, collection, encoder)
    assert list((collection.root / "versions").iterdir()) == []
    files = sorted(collection.shards(encoder.fingerprint).glob("*.npy"))
    assert len(files) == shards
    return files


def content(summary: BuildSummary, collection: Collection) -> str:
    return verify(collection, summary.version).content


@pytest.mark.parametrize("shards", [0, 1, 4, 6])
def test_a_build_resumes_after_the_last_finished_shard(
    corpus: Path, collection: Collection, tmp_path: Path, shards: int
) -> None:
    undisturbed = Collection(tmp_path / "undisturbed")
    whole, every = run(corpus, undisturbed)
    interrupt(corpus, collection, shards)
    summary, texts = run(corpus, collection)
    assert texts == every[shards * SHARD :]
    assert summary.encoded == TEXTS - shards * SHARD
    assert content(summary, collection) == content(whole, undisturbed)


def test_a_damaged_shard_is_made_again(corpus: Path, collection: Collection, tmp_path: Path) -> None:
    undisturbed = Collection(tmp_path / "undisturbed")
    whole, every = run(corpus, undisturbed)
    damaged = interrupt(corpus, collection, 5)[2]
    lost = np.load(damaged)["hash"]
    sound = damaged.read_bytes()
    damaged.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    summary, texts = run(corpus, collection)
    assert len(lost) == SHARD
    assert summary.encoded == len(texts) == TEXTS - 4 * SHARD
    assert set(texts) < set(every)
    assert content(summary, collection) == content(whole, undisturbed)


def test_a_resumed_build_of_a_changed_corpus_reuses_unchanged_texts(
    corpus: Path, collection: Collection, tmp_path: Path
) -> None:
    interrupt(corpus, collection, 3)
    changed = write_lines(tmp_path / "later.jsonl", {"_id": "x", "text": "新文"}, {"_id": "0", "text": "第0种药的用法"})
    summary, texts = run(changed, collection)
    assert texts == ["新文"]
    assert (summary.encoded, summary.reused) == (1, 1)


def test_unfinished_shards_of_another_encoder_are_not_used(corpus: Path, collection: Collection) -> None:
    files = interrupt(corpus, collection, 3)
    run(corpus, collection, FastEncoder("another"))
    assert all(path.exists() for path in files)
    assert run(corpus, collection)[0].encoded == TEXTS - 3 * SHARD
    assert not any(path.exists() for path in files)


LIMITED = """
import resource, sys
import cli, indexer.reindex
from tests.support.fast_encoder import FastEncoder
indexer.reindex.Encoders.load = lambda self: FastEncoder()
limit, corpus, collection, kind = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
options = ["--collection", collection, "--index", kind, "--threads", "1", "--publish"]
sys.exit(cli.main(["index", "build", corpus, *options]))
"""


def test_a_full_disk_gives_a_one_line_error_and_leaves_no_partial_version(tmp_path: Path) -> None:
    """A file size limit acts like a full disk; each limit stops another writer."""
    draw = random.Random(0)
    texts = ("".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(60)) for _ in range(800))
    corpus = write_lines(tmp_path / "c.jsonl", *({"_id": str(n), "text": text} for n, text in enumerate(texts)))
    options = BuildOptions(index=IndexKind.HNSW, threads=1)
    folder = build([corpus], FastEncoder(), Collection(tmp_path / "sizes"), options).folder
    # Written in this order; words of random characters take more space than the characters.
    documents, graph = ((folder / name).stat().st_size for name in ("documents.bin", "index.faiss"))
    words = max(path.stat().st_size for path in (folder / "lexical").iterdir())
    assert (folder / "vectors.npy").stat().st_size < documents < min(graph, words)
    root = tmp_path / "collection"
    for limit, kind, message in (
        (10, IndexKind.FLAT, "File too large"),
        (2_000, IndexKind.FLAT, "ids could not be written"),
        (documents // 2, IndexKind.FLAT, "File too large"),
        ((documents + graph) // 2, IndexKind.HNSW, "index.faiss could not be written"),
        ((documents + words) // 2, IndexKind.FLAT, "lexical could not be written"),
    ):
        command = [sys.executable, "-c", LIMITED, str(limit), str(corpus), str(root), kind]
        done = subprocess.run(command, capture_output=True, text=True)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1
        assert line.startswith(f"care index: {root}")
        assert message in line
        assert line.endswith("; free some space, then run the same command again")
        assert Collection(root).current() is None
        assert list((root / "versions").iterdir()) == []


def test_an_unreadable_corpus_leaves_no_files(collection: Collection, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(Exception, match="cannot be read to its end"):
        run(path, collection)
    assert list((collection.root / "versions").iterdir()) == []

"""A build that ends before its time goes on where it was, and what it leaves behind is never half a version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, BuildSummary, build
from indexer.publish import verify
from indexer.store import Collection, IndexKind
from models.onnx_encoder import Vectors
from models.spec import Side
from tests.support.fast_encoder import FastEncoder
from tests.unit.indexer.support import write_lines

TEXTS = 20
SHARD = 3


class Dying(FastEncoder):
    """Gives up when it is asked for the shard after the first `shards`."""

    def __init__(self, shards: int) -> None:
        super().__init__(swayed=True)
        self._left = shards

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return super().encode(texts, side)


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
    """A build that dies in the shard after so many; returns the files of those that it finished."""
    encoder = Dying(shards)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, collection, encoder)
    assert list((collection.root / "versions").iterdir()) == []
    files = sorted(collection.shards(encoder.fingerprint).glob("*.npy"))
    assert len(files) == shards
    return files


def content(summary: BuildSummary, collection: Collection) -> str:
    return verify(collection, summary.version).content


@pytest.mark.parametrize("shards", [0, 1, 4, 6])
def test_it_goes_on_after_the_last_finished_shard(
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


def test_a_corpus_that_changed_meanwhile_uses_what_still_fits(
    corpus: Path, collection: Collection, tmp_path: Path
) -> None:
    interrupt(corpus, collection, 3)
    changed = write_lines(tmp_path / "later.jsonl", {"_id": "x", "text": "新文"}, {"_id": "0", "text": "第0种药的用法"})
    summary, texts = run(changed, collection)
    assert texts == ["新文"]
    assert (summary.encoded, summary.reused) == (1, 1)


def test_unfinished_work_of_another_encoder_is_left_alone(corpus: Path, collection: Collection) -> None:
    files = interrupt(corpus, collection, 3)
    run(corpus, collection, FastEncoder("another"))
    assert all(path.exists() for path in files)
    assert run(corpus, collection)[0].encoded == TEXTS - 3 * SHARD
    assert not any(path.exists() for path in files)


# Files may not grow beyond so many bytes: what a full disk looks like to each that writes, and whom the line names.
LIMITS = [
    (10, IndexKind.FLAT, "File too large"),
    (2_000, IndexKind.FLAT, "ids could not be written"),
    (100_000, IndexKind.FLAT, "File too large"),
    (240_000, IndexKind.FLAT, "lexical could not be written"),
    (300_000, IndexKind.HNSW, "index.faiss could not be written"),
]
LIMITED = """
import resource, sys
from pathlib import Path
import cli, indexer.reindex
from tests.support.fast_encoder import FastEncoder
indexer.reindex.Encoders.load = lambda self: FastEncoder()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(cli.main(["index", "build", "examples/corpus.jsonl", "--collection", sys.argv[2], "--index", sys.argv[3],
                   "--passage-tokens", "64", "--overlap", "8", "--shard", "64", "--threads", "1", "--publish"]))
"""


@pytest.mark.parametrize(("limit", "kind", "said"), LIMITS)
def test_a_full_disk_is_one_line_and_leaves_nothing_half_done(
    tmp_path: Path, limit: int, kind: IndexKind, said: str
) -> None:
    command = [sys.executable, "-c", LIMITED, str(limit), str(tmp_path / "c"), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"care index: {tmp_path / 'c'}")
    assert said in line
    assert line.endswith("; free some space, then run the same command again")
    assert Collection(tmp_path / "c").current() is None
    assert list((tmp_path / "c" / "versions").iterdir()) == []


def test_a_corpus_that_cannot_be_read_leaves_nothing(collection: Collection, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(Exception, match="cannot be read to its end"):
        run(path, collection)
    assert list((collection.root / "versions").iterdir()) == []

"""What fresh documents cost: a search beside them, a change among them, and the log behind them.

  make bench-fresh ARGS='--documents 100 1000 10000'

A snapshot of 2,000 made-up documents, and so many fresh ones of one passage each, about 300 characters, with random
vectors of 512 dimensions. One thread. A search is what it takes beyond the search of the snapshot: `dense` with one
query, and with each of 32 in a batch, and `words`. `apply` lays one more document over the rest, the mean of 32 in a
row; `append` writes it to the log, fsync included; `load` reads the whole log and lays it over, as a start does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy reads it when it is imported

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.fresh_log import Cursor, FreshLog, Posted
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot
from tests.bench.index import KINDS, SENTENCE, TOPICS, write_corpus
from tests.support.fast_encoder import FastEncoder

DIM = 512
MAIN_DOCUMENTS = 2000
REPEATS = 31
CHANGES = 32
QUERY = "高血压患者发热时应当服什么药"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 1000, 10_000])
    print("fresh  dense ms  of a batch of 32  words ms  apply ms  append ms  load ms  log MB")
    with tempfile.TemporaryDirectory() as folder:
        snapshot = _snapshot(Path(folder))
        for count in parser.parse_args().documents:
            _measure(snapshot, FreshLog(Path(folder) / f"fresh-{count}"), count)
    return 0


def _snapshot(folder: Path) -> Snapshot:
    corpus = folder / "corpus.jsonl.gz"
    write_corpus(corpus, MAIN_DOCUMENTS, changed=0)
    return Snapshot.open(build([corpus], FastEncoder(), Collection(folder / "c"), BuildOptions()).folder)


def _measure(snapshot: Snapshot, log: FreshLog, count: int) -> None:
    made = [_document(number) for number in range(count + CHANGES)]
    log.append(made[:count])
    began = time.perf_counter()
    frames, cursor = log.read(Cursor(0))
    overlay = Overlay.over(snapshot).apply(frames)
    load = time.perf_counter() - began
    append, apply = [], []
    for document in made[count:]:
        append.append(_seconds(lambda document=document: log.append([document])))
        frames, cursor = log.read(cursor)
        began = time.perf_counter()
        overlay = overlay.apply(frames)
        apply.append(time.perf_counter() - began)
    queries = np.stack([document.vectors[0] for document in made[:CHANGES]]).astype(np.float32)
    least = 0.5  # as a snapshot's hits would set it: few fresh passages stay

    def dense(batch: np.ndarray) -> None:
        for scores in overlay.score_vectors(batch):
            overlay.pick(scores, (), least)

    one, many = _repeated(lambda: dense(queries[:1])), _repeated(lambda: dense(queries)) / len(queries)
    words = _repeated(lambda: overlay.pick(overlay.score_words(QUERY), (), 5.0))
    size = sum(path.stat().st_size for path in log.folder.iterdir()) / 1e6
    # Of single changes the mean: now and then one joins blocks, and that is part of the price.
    times = (one, many, words, sum(apply) / len(apply), median(append), load)
    print(f"{count:5}", *(f"{1000 * seconds:8.2f}" for seconds in times), f"{size:6.1f}")


def _document(number: int) -> Posted:
    draw = random.Random(number)
    text = "".join(draw.choice(TOPICS) + SENTENCE for _ in range(7))
    vector = np.random.default_rng(number).standard_normal((1, DIM))
    unit = (vector / np.linalg.norm(vector)).astype(np.float16)
    return Posted(f"f{number}", f"标题{number}", text, {"kind": draw.choice(KINDS)}, [(0, len(text))], "fp", unit)


def _repeated(act: Callable[[], object]) -> float:
    return median(_seconds(act) for _ in range(REPEATS))


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

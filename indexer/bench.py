"""Measures the indexer without its encoder: `python -m indexer.bench index | fresh | words`.

index   memory and time of a build and of a re-index of 2 % changed documents, by corpus size. The corpus is made up;
        a stand-in of 64 dimensions takes the encoder's place. Each build is a process of its own; memory is its peak,
        own (RssAnon) and with mapped files (VmRSS).
fresh   milliseconds that fresh documents add to a search of 2,000 documents: `dense` with one query and with each of
        32 in a batch, and `words`. `apply` adds one document to the overlay (mean of 32), `append` writes it to the
        log with fsync, `load` reads the whole log, as a start does. Set OPENBLAS_NUM_THREADS=1 for one thread.
words   processor time of a words search under filters that allow a share of the rows, at random or, at worst, those
        that match the query least. Rows are random Chinese-like texts; median and maximum over some queries.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.fresh_log import Cursor, FreshLog, Posted
from indexer.store.kinds import IndexKind
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot
from indexer.synthetic import KINDS, TOPICS
from models.encoder.onnx import Vectors
from models.encoder.spec import TOKENIZER_FILE, EncoderSpec, Side, Variant
from models.encoder.tokenizer import Tokenizer
from models.lexical import LexicalIndex
from models.package import BUNDLED_ENCODER

CHANGED_SHARE = 0.02
SAMPLE_SECONDS = 0.02
SENTENCE = "患者应当遵照医嘱按时服药，注意休息，合理饮食，定期复查，如有不适请及时就诊。"
STAND_IN_DIM = 64

FRESH_DIM, FRESH_BASE = 512, 2000
REPEATS, CHANGES = 31, 32
QUERY = "高血压患者发热时应当服什么药"

SHARES = (0.001, 0.1, 0.5, 0.9)
CHARACTERS, LENGTH, QUERY_LENGTH = 3000, 80, 6
QUERIES, K = 9, 200


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="indexer.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    index, fresh, words = (parts.add_parser(name) for name in ("index", "fresh", "words"))
    index.add_argument("--documents", type=int, nargs="+", default=[100_000])
    index.add_argument("--build", nargs=2, metavar=("CORPUS", "COLLECTION"), help=argparse.SUPPRESS)
    fresh.add_argument("--documents", type=int, nargs="+", default=[100, 1000, 10_000])
    words.add_argument("rows", type=int, nargs="?", default=60_000)
    options = parser.parse_args()
    if options.part == "words":
        measure_words(options.rows)
    elif options.part == "fresh":
        measure_fresh(options.documents)
    elif options.build:
        _build(*map(Path, options.build))
    else:
        print("documents  run       own MB  mapped MB  encoded  seconds: read  encode  index  lexical  write")
        for documents in options.documents:
            measure_builds(documents)
    return 0


class StandInEncoder:
    """An encoder as cheap as a hash; its vectors mean nothing. Passages are cut as for the bundled encoder."""

    def __init__(self) -> None:
        self.spec = EncoderSpec.load(BUNDLED_ENCODER).model_copy(update={"dim": STAND_IN_DIM})
        self.variant, self.bulk_texts, self.fingerprint = Variant.FP32, 1024, "stand-in"
        self.tokenizer = Tokenizer.load(BUNDLED_ENCODER / TOKENIZER_FILE, self.spec.max_length)

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        digests = b"".join(blake2b(text.encode(), digest_size=STAND_IN_DIM).digest() for text in texts)
        vectors = np.frombuffer(digests, dtype=np.int8).reshape(-1, STAND_IN_DIM).astype(np.float32)
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def write_corpus(path: Path, documents: int, changed: float) -> None:
    """Writes gzipped JSON lines; of the share `changed` the texts differ from those of another call."""
    every = round(1 / changed) if changed else 0
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(documents):
            topic, other = TOPICS[number % len(TOPICS)], TOPICS[number // len(TOPICS) % len(TOPICS)]
            revised = "（修订）" if every and number % every == 0 else ""
            metadata = {
                "kind": KINDS[number % len(KINDS)],
                "year": 2000 + number % 26,
                "tags": [topic, other],
                "source": f"https://example.org/documents/{number}",
            }
            text = f"第{number}条{revised}：{topic}与{other}。{SENTENCE}{SENTENCE}"
            row = {"_id": f"synthetic-{number}", "title": f"{topic}{number}", "text": text, "metadata": metadata}
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def measure_builds(documents: int) -> None:
    with tempfile.TemporaryDirectory(prefix="care-bench-") as folder:
        collection, results = Path(folder, "collection"), []
        for run, changed in (("first", 0.0), ("re-index", CHANGED_SHARE)):
            corpus = Path(folder, f"{run}.jsonl.gz")
            write_corpus(corpus, documents, changed)
            own, mapped, result = _run(corpus, collection)
            results.append(result)
            seconds = "  ".join(f"{value:5.1f}" for value in result["seconds"].values())
            memory = f"{own / 1e6:6.0f}  {mapped / 1e6:9.0f}"
            print(f"{documents:9}  {run:8}  {memory}  {result['encoded']:7}  {seconds}", flush=True)
    first, again = results
    texts = again["encoded"] / first["encoded"]
    seconds = again["seconds"]["encode"] / first["seconds"]["encode"]
    took = f"the re-index encoded {texts:.1%} of the texts; its encoding stage took {seconds:.1%} of the first's"
    print(f"{took}, with an encoder that costs nothing: what is left is finding the vectors that are known")


def _build(corpus: Path, root: Path) -> None:
    """Builds once, in the child process; prints the result as JSON."""
    collection = Collection(root)
    summary = build([corpus], StandInEncoder(), collection, BuildOptions(index=IndexKind.FLAT))
    collection.publish(summary.version)
    print(json.dumps({"encoded": summary.encoded, "seconds": summary.seconds}))


def _run(corpus: Path, collection: Path) -> tuple[int, int, dict[str, Any]]:
    """Runs a build; returns its peak memory, own and with mapped files, in bytes, and its result."""
    command = [sys.executable, "-m", "indexer.bench", "index", "--build", str(corpus), str(collection)]
    peak = {"RssAnon": 0, "VmRSS": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            # A process that is about to end has none of these lines.
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peak:
                    peak[name] = max(peak[name], int(value.split()[0]) * 1024)
            time.sleep(SAMPLE_SECONDS)
        output, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the build ended with {process.returncode}")
    return peak["RssAnon"], peak["VmRSS"], json.loads(output)


def measure_fresh(counts: Sequence[int]) -> None:
    print("fresh  dense ms  of a batch of 32  words ms  apply ms  append ms  load ms  log MB")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl.gz")
        write_corpus(corpus, FRESH_BASE, changed=0)
        encoder, collection = StandInEncoder(), Collection(Path(folder, "c"))
        snapshot = Snapshot.open(build([corpus], encoder, collection, BuildOptions()).folder)
        for count in counts:
            _measure_overlay(snapshot, FreshLog(Path(folder, f"fresh-{count}")), count)


def _measure_overlay(snapshot: Snapshot, log: FreshLog, count: int) -> None:
    made = [_document(number) for number in range(count + CHANGES)]
    log.append(made[:count])
    began = time.perf_counter()
    frames, cursor = log.read(Cursor(0))
    overlay = Overlay(snapshot).apply(frames)
    load = time.perf_counter() - began
    append, apply = [], []
    for document in made[count:]:
        began = time.perf_counter()
        log.append([document])
        append.append(time.perf_counter() - began)
        frames, cursor = log.read(cursor)
        began = time.perf_counter()
        overlay = overlay.apply(frames)
        apply.append(time.perf_counter() - began)
    queries = np.stack([document.vectors[0] for document in made[:CHANGES]]).astype(np.float32)

    def dense(batch: Vectors) -> None:
        for scores in overlay.score_vectors(batch):
            overlay.pick(scores, (), 0.5)  # a typical lowest score of a snapshot's hits: few fresh passages stay

    one, many = _median(lambda: dense(queries[:1])), _median(lambda: dense(queries)) / len(queries)
    words = _median(lambda: overlay.pick(overlay.score_words(QUERY), (), 5.0))
    size = sum(path.stat().st_size for path in log.folder.iterdir()) / 1e6
    # The mean of single changes: some of them join blocks, which is part of the cost.
    times = (one, many, words, sum(apply) / len(apply), median(append), load)
    print(f"{count:5}", *(f"{1000 * seconds:8.2f}" for seconds in times), f"{size:6.1f}")


def _document(number: int) -> Posted:
    draw = random.Random(number)
    text = "".join(draw.choice(TOPICS) + SENTENCE for _ in range(7))
    vector = np.random.default_rng(number).standard_normal((1, FRESH_DIM))
    unit = (vector / np.linalg.norm(vector)).astype(np.float16)
    return Posted(f"f{number}", f"标题{number}", text, {"kind": draw.choice(KINDS)}, [(0, len(text))], "fp", unit)


def _median(act: Callable[[], object]) -> float:
    return median(timeit.repeat(act, number=1, repeat=REPEATS))


def measure_words(rows: int) -> None:
    draw = np.random.default_rng(0)
    # Characters as unevenly frequent as in a language.
    codes = np.minimum(CHARACTERS * draw.random((rows, LENGTH)) ** 3, CHARACTERS - 1).astype(int)
    texts = ["".join(chr(0x4E00 + code) for code in row) for row in codes.tolist()]
    index = LexicalIndex.build(texts)
    queries = [text[start : start + QUERY_LENGTH] for text, start in zip(texts[::997], range(QUERIES), strict=False)]
    print(f"{rows} rows, k {K}, {len(queries)} queries, milliseconds of processor time")
    print(f"no filter: {_timed(index, queries, [None] * len(queries))}")
    orders = [index.search(query, rows)[0] for query in queries]
    for share in SHARES:
        alike = draw.random(rows) < share
        against = [~np.isin(np.arange(rows), order[: int(rows * (1 - share))]) for order in orders]
        print(f"{share:.1%} at random: {_timed(index, queries, [alike] * len(queries))}")
        print(f"{share:.1%} against the query: {_timed(index, queries, against)}")


def _timed(index: LexicalIndex, queries: list[str], masks: Sequence[NDArray[np.bool_] | None]) -> str:
    spent = []
    for query, allowed in zip(queries, masks, strict=True):
        began = time.process_time()
        index.search(query, K, allowed)
        spent.append(1000 * (time.process_time() - began))
    return f"{np.median(spent):.1f}, at most {max(spent):.1f}"


if __name__ == "__main__":
    sys.exit(main())

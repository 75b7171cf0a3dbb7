"""What a build costs beside the encoder: memory and time by corpus size, and what a re-index encodes again.

  python -m tests.bench.index --documents 100000 1000000
  python -m tests.bench.index --documents 2000 --encoder models/pretrained/care-small-zh

The corpus is made up: a title, a text of about a hundred characters and four metadata fields, one of them different in
every document. Unless --encoder names a folder, a stand-in of 64 dimensions takes the encoder's place, so that what is
measured is the indexer. Then 2 % of the documents change, and the corpus is indexed again. Each build runs in a process
of its own; memory is its peak, own (RssAnon) and with the pages of files that it has mapped (VmRSS), which the system
takes back when it needs them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.kinds import IndexKind
from models.onnx_encoder import OnnxEncoder
from tests.support.fast_encoder import FastEncoder

CHANGED_SHARE = 0.02
SAMPLE_SECONDS = 0.02
KINDS = ("disease", "drug", "test", "first-aid")
TOPICS = ("高血压", "糖尿病", "发热", "骨折", "哮喘", "头痛", "贫血", "胃炎")
SENTENCE = "患者应当遵照医嘱按时服药，注意休息，合理饮食，定期复查，如有不适请及时就诊。"


@dataclass(frozen=True)
class Peak:
    """Bytes of memory at the worst moment: the process's own, and with mapped files."""

    own: int
    mapped: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000])
    parser.add_argument("--encoder", help="encoder folder (default: a stand-in)")
    parser.add_argument("--index", type=IndexKind, choices=list(IndexKind), default=IndexKind.FLAT)
    parser.add_argument("--build", nargs=2, metavar=("CORPUS", "COLLECTION"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build:
        _build(Path(given.build[0]), Path(given.build[1]), given.encoder, given.index)
        return 0
    print("documents  run       own MB  mapped MB  encoded  seconds: read  encode  index  lexical  write")
    for documents in given.documents:
        _measure(documents, given.encoder, given.index)
    return 0


def _measure(documents: int, encoder: str | None, index: IndexKind) -> None:
    with tempfile.TemporaryDirectory(prefix="care-bench-") as folder:
        collection, results = Path(folder, "collection"), []
        for run, seed in (("first", 0), ("re-index", 1)):
            corpus = Path(folder, f"{run}.jsonl.gz")
            write_corpus(corpus, documents, changed=CHANGED_SHARE if seed else 0.0)
            peak, result = _run(corpus, collection, encoder, index)
            results.append(result)
            _print(documents, run, peak, result)
    first, again = results
    texts = again["encoded"] / first["encoded"]
    seconds = again["seconds"]["encode"] / first["seconds"]["encode"]
    free = "" if encoder else ", with an encoder that costs nothing: what is left is finding the vectors that are known"
    print(f"the re-index encoded {texts:.1%} of the texts; its encoding stage took {seconds:.1%} of the first's{free}")


def write_corpus(path: Path, documents: int, changed: float) -> None:
    """Gzipped JSON lines; every so manieth document has another text if some `changed`."""
    every = round(1 / changed) if changed else 0
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(documents):
            row = _row(number, again=bool(every) and number % every == 0)
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _row(number: int, *, again: bool) -> dict[str, Any]:
    topic, other = TOPICS[number % len(TOPICS)], TOPICS[number // len(TOPICS) % len(TOPICS)]
    text = f"第{number}条{'（修订）' if again else ''}：{topic}与{other}。{SENTENCE}{SENTENCE}"
    metadata = {
        "kind": KINDS[number % len(KINDS)],
        "year": 2000 + number % 26,
        "tags": [topic, other],
        "source": f"https://example.org/documents/{number}",
    }
    return {"_id": f"synthetic-{number}", "title": f"{topic}{number}", "text": text, "metadata": metadata}


def _build(corpus: Path, root: Path, folder: str | None, index: IndexKind) -> None:
    """One build, in the child; prints what came of it as JSON."""
    encoder = OnnxEncoder.load(Path(folder)) if folder else FastEncoder(remember=False)
    collection = Collection(root)
    summary = build([corpus], encoder, collection, BuildOptions(index=index))
    collection.publish(summary.version)
    print(json.dumps({"encoded": summary.encoded, "seconds": summary.seconds}))


def _run(corpus: Path, collection: Path, encoder: str | None, index: IndexKind) -> tuple[Peak, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.index", "--build", str(corpus), str(collection), "--index", index]
    command += ["--encoder", encoder] if encoder else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        own = mapped = 0
        for moment in _memory(process):
            own, mapped = max(own, moment.own), max(mapped, moment.mapped)
        output, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the build ended with {process.returncode}")
    return Peak(own, mapped), json.loads(output)


def _memory(process: subprocess.Popen[str]) -> Iterator[Peak]:
    """What the process holds, again and again until it ends."""
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)
                 if name in ("RssAnon", "VmRSS")}  # fmt: skip
        if len(sizes) == 2:  # a process that is about to end has none
            yield Peak(sizes["RssAnon"], sizes["VmRSS"])
        time.sleep(SAMPLE_SECONDS)


def _print(documents: int, run: str, peak: Peak, result: dict[str, Any]) -> None:
    seconds = "  ".join(f"{value:5.1f}" for value in result["seconds"].values())
    memory = f"{peak.own / 1e6:6.0f}  {peak.mapped / 1e6:9.0f}"
    print(f"{documents:9}  {run:8}  {memory}  {result['encoded']:7}  {seconds}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

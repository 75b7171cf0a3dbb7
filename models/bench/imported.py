"""Measures documents per second of an imported encoder, and of its checkpoint in sentence-transformers.

  python -m models.bench.imported ENCODER CHECKPOINT --corpus corpus.jsonl.gz

Both go from strings to vectors, in bf16 on a GPU, in turn; sentence-transformers with the quickest of its batch sizes.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from models.bench.measure import BATCH_SIZES
from models.bench.shapes import load_texts, seconds, spread
from models.encoder.packed.encoder import PackedEncoder
from models.encoder.spec import Side


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", type=Path, help="folder that care encoder import wrote")
    parser.add_argument("checkpoint", type=Path, help="the sentence-transformers folder that it read")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with texts, .gz too")
    parser.add_argument("--documents", type=int, default=4096, help="how many of them (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is measured (%(default)s)")
    options = parser.parse_args(arguments)
    from sentence_transformers import SentenceTransformer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    texts = load_texts(options.corpus, options.documents)
    ours = PackedEncoder.load(options.encoder, device=str(device))
    theirs = SentenceTransformer(str(options.checkpoint), device=str(device), model_kwargs={"dtype": dtype})
    theirs.max_seq_length = ours.spec.max_length

    def peer(size: int, some: list[str] = texts) -> np.ndarray:
        return np.asarray(theirs.encode_document(some, batch_size=size, normalize_embeddings=True))

    peer(BATCH_SIZES[0], texts[: BATCH_SIZES[0]])  # the first call of a process takes longer
    times = {size: seconds(partial(peer, size, texts[: len(texts) // 8]), device) for size in BATCH_SIZES}
    best = min(times, key=lambda size: times[size])
    works = {
        "ours": partial(ours.encode, texts, Side.DOCUMENT),
        f"sentence-transformers, batches of {best}": partial(peer, best),
    }
    vectors = [work()[:, : ours.spec.dim] for work in works.values()]  # compiled for every shape that comes
    cosines = (vectors[0] * vectors[1]).sum(1) / np.linalg.norm(vectors[1], axis=1)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            taken[name].append(seconds(work, device))
    rates = {name: [len(texts) / one for one in of_name] for name, of_name in taken.items()}
    for name, rate in rates.items():
        print(f"{name}: {spread(rate)} documents/s")
    first, second = map(median, rates.values())
    tokens = sum(map(len, ours.tokenizer.batch(texts))) / len(texts)
    print(f"{first / second:.2f} times, {len(texts)} documents of {tokens:.0f} tokens, {dtype}")
    print(f"cosine {cosines.min():.4f} at least, {cosines.mean():.5f} on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Builds txtai's index for `make bench-peers` from given vectors. Runs in txtai's own environment.

  python -m loadtest.lab.peers_txtai VECTORS IDS WEIGHTS TARGET

The index is txtai's own choice for this number of vectors (`IVF…,Flat`), without its document store: it answers ids
and scores only, which is the least work for it. Its API then encodes queries with WEIGHTS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from txtai import Embeddings


def build(vectors: Path, ids: Path, weights: Path, target: Path) -> None:
    names = json.loads(ids.read_text(encoding="utf-8"))
    values = np.load(vectors, mmap_mode="r").astype(np.float32)
    embeddings = Embeddings({"method": "external", "content": False, "format": "json"})
    embeddings.index((name, value, None) for name, value in zip(names, values, strict=True))
    # From here on vectors come from the encoder.
    embeddings.config |= {"method": "clspooling", "path": str(weights), "maxlength": 512}
    embeddings.save(str(target))
    print(f"txtai indexed {embeddings.count()} vectors: {embeddings.config['build']}")


if __name__ == "__main__":
    build(*(Path(argument) for argument in sys.argv[1:]))

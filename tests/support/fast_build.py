"""`care index build CORPUS --publish` with a stand-in for the encoder, for the test that kills it hundreds of times.

python -m tests.support.fast_build CORPUS COLLECTION SHARD
"""

from __future__ import annotations

import sys
from pathlib import Path

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from tests.support.fast_encoder import FastEncoder


def main(corpus: str, root: str, shard: str) -> None:
    collection = Collection(Path(root))
    options = BuildOptions(passage_tokens=64, overlap=8, shard_texts=int(shard))
    summary = build([Path(corpus)], FastEncoder(remember=False, swayed=True), collection, options)
    collection.publish(summary.version)
    print(f"{summary.encoded} encoded")


if __name__ == "__main__":
    main(*sys.argv[1:])

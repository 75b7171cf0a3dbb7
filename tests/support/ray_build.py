"""A build on a Ray cluster with a stand-in for the encoder that can be watched, and killed at a known moment.

python -m tests.support.ray_build CORPUS COLLECTION ADDRESS WATCH

Every process of the cluster writes a file into the folder WATCH, named after its node, and encodes when there are two.
If the folder holds a file `die`, the first process that removes it kills itself in the middle of a shard. If it holds
`wait`, all processes wait until it is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from indexer.build import BuildOptions, build
from indexer.cluster import Cluster
from indexer.store.collection import Collection
from models.encoder.onnx import Vectors
from models.encoder.spec import Side
from tests.support.fast_encoder import FastEncoder

WAIT_SECONDS = 240.0
OPTIONS = BuildOptions(passage_tokens=64, overlap=8, shard_texts=4, threads=1)


class WatchedEncoder(FastEncoder):
    """Encodes like the stand-in of one process."""

    def __init__(self, watch: Path) -> None:
        import ray

        super().__init__(remember=False, swayed=True)
        self._watch = watch
        self._node = ray.get_runtime_context().get_node_id()

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        with (self._watch / f"node-{self._node}").open("a") as file:
            file.write("shard\n")
        until(lambda: len(list(self._watch.glob("node-*"))) == 2)
        with contextlib.suppress(FileNotFoundError):
            (self._watch / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: not (self._watch / "wait").exists())
        return super().encode(texts, side)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition never held")
        time.sleep(0.02)


def main(corpus: str, root: str, address: str, watch: str) -> None:
    cluster = Cluster(address, partial(WatchedEncoder, Path(watch)))
    collection = Collection(Path(root))
    encoder = FastEncoder(remember=False, swayed=True)
    summary = build([Path(corpus)], encoder, collection, replace(OPTIONS, encode=cluster.encode))
    collection.publish(summary.version)
    print(f"{summary.encoded} encoded")


if __name__ == "__main__":
    main(*sys.argv[1:])

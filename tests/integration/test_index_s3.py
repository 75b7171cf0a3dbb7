"""A build whose shards lie on a real S3 server, moto's: it stops half-way, an object is damaged, and it goes on.

Runs only where s3fs and moto[server] are installed: 300 MB that the development environment does without.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from indexer.build import BuildOptions, build
from indexer.publish import verify
from indexer.store import Collection
from models.encoder.onnx import Vectors
from models.encoder.spec import Side
from tests.support.fast_encoder import FastEncoder

BUCKET = "care"
SHARD = 3
START_SECONDS = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


class Stopping(FastEncoder):
    """Stops when it is asked for a fifth shard."""

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        if self.count == 4 * SHARD:
            raise KeyboardInterrupt
        return super().encode(texts, side)


@contextmanager
def s3_server() -> Iterator[None]:
    """A server on a free port, which the environment of this process points at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"})
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def test_a_build_over_s3_goes_on_after_a_stop_and_a_damaged_object(tmp_path: Path) -> None:
    corpus = Path("examples/corpus.jsonl")
    options = BuildOptions(shard_texts=SHARD, shards=f"s3://{BUCKET}/shards")
    with s3_server():
        store = fsspec.filesystem("s3")
        store.mkdir(BUCKET)
        plain, collection = Collection(tmp_path / "plain"), Collection(tmp_path / "collection")
        whole = build([corpus], FastEncoder(swayed=True), plain, BuildOptions(shard_texts=SHARD))
        with suppress(KeyboardInterrupt):
            build([corpus], Stopping(swayed=True), collection, options)
        kept = store.find(BUCKET)
        store.pipe_file(kept[0], store.cat_file(kept[0])[:-1] + b"?")
        summary = build([corpus], FastEncoder(swayed=True), collection, options)
        store.invalidate_cache()
        left = store.find(BUCKET)
    assert verify(collection, summary.version).content == verify(plain, whole.version).content
    assert left == []
    assert whole.encoded - summary.encoded == 3 * SHARD  # of four shards one was damaged

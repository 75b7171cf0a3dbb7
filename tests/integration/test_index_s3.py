"""A build with shards on a real S3 server (moto): it stops halfway, an object is damaged, and it resumes.

python -m tests.integration.test_index_s3     (needs s3fs and moto[server]: 300 MB, not in the development environment)
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.versions import verify
from loadtest.harness.servers import free_port
from models.encoder.onnx import Vectors
from models.encoder.spec import Side
from tests.support.fast_encoder import FastEncoder

BUCKET = "care"
SHARD = 3
START_SECONDS = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


class FailingEncoder(FastEncoder):
    """Fails at the fifth shard."""

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        if self.count == 4 * SHARD:
            raise KeyboardInterrupt
        return super().encode(texts, side)


@contextmanager
def s3_server() -> Iterator[None]:
    """Starts a server on a free port and points the environment of this process at it."""
    port = free_port()
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


def main() -> None:
    import fsspec

    corpus = Path("examples/corpus.jsonl")
    options = BuildOptions(shard_texts=SHARD, shards=f"s3://{BUCKET}/shards")
    with tempfile.TemporaryDirectory(prefix="care-s3-") as folder, s3_server():
        store = fsspec.filesystem("s3")
        store.mkdir(BUCKET)
        plain, collection = Collection(Path(folder, "plain")), Collection(Path(folder, "collection"))
        whole = build([corpus], FastEncoder(swayed=True), plain, BuildOptions(shard_texts=SHARD))
        with suppress(KeyboardInterrupt):
            build([corpus], FailingEncoder(swayed=True), collection, options)
        kept = store.find(BUCKET)
        store.pipe_file(kept[0], store.cat_file(kept[0])[:-1] + b"?")
        summary = build([corpus], FastEncoder(swayed=True), collection, options)
        store.invalidate_cache()
        same = verify(collection, summary.version).content == verify(plain, whole.version).content
        left = store.find(BUCKET)
    reused = whole.encoded - summary.encoded
    print(f"{len(kept)} shards when it stopped, one damaged; {reused} texts were not encoded again")
    print(f"same content: {same}; objects left: {len(left)}")
    if not same or left or reused != 3 * SHARD:
        sys.exit(1)


if __name__ == "__main__":
    main()

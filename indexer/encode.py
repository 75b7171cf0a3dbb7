"""Encodes texts to unit vectors, shard by shard; each shard is written as soon as it is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from indexer.errors import BadBuild
from indexer.store.documents import HASH_BYTES
from indexer.store.shards import Embeddings, Shards
from models.encoder.onnx import Vectors
from models.encoder.spec import Computed, EncoderSpec, Side
from models.encoder.tokenizer import Tokenizer
from models.progress import Progress

# The graph ends in the norm, so this allows for the rounding of int8 and fp16 graphs only.
NORM_TOLERANCE = 1e-2

Item = TypeVar("Item")


class Encoder(Protocol):
    """An encoder for the indexer: equal `fingerprint`, equal vectors; `bulk_texts` is its preferred batch."""

    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def variant(self) -> Computed: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def bulk_texts(self) -> int: ...
    def encode(self, texts: Sequence[str], side: Side) -> Vectors: ...


EncodeShards = Callable[[Iterable[list[str]], Encoder, Shards], Iterator[int]]
"""Encodes every list of texts as one shard and writes it; yields the number of its texts when it is written."""


def encode_here(shards: Iterable[list[str]], encoder: Encoder, place: Shards) -> Iterator[int]:
    """Encodes in this process, one shard after the other; a thread reads the texts of the next meanwhile."""
    waiting = iter(shards)
    with ThreadPoolExecutor(1, "reader") as reader:
        ahead = reader.submit(next, waiting, None)
        while (texts := ahead.result()) is not None:
            ahead = reader.submit(next, waiting, None)
            encode_shard(texts, encoder, place)
            yield len(texts)


@dataclass(frozen=True)
class Work:
    """How texts are encoded: where their shards lie, how many texts make one, and what encodes them."""

    place: Shards
    shard_texts: int
    encode: EncodeShards = encode_here

    def do(self, texts: Iterable[str], count: int, encoder: Encoder) -> None:
        """Encodes `count` texts in shards of one size, cut from the front."""
        # On a GPU a vector depends a little on its batch: a resumed build cuts the rest as before.
        with Progress("encode", "passages", count) as bar:
            for finished in self.encode(chunked(texts, self.shard_texts), encoder, self.place):
                bar.update(finished)


def encode_shard(texts: Sequence[str], encoder: Encoder, place: Shards) -> str:
    """Encodes and writes one shard; returns its name."""
    vectors = checked(encoder.encode(texts, Side.DOCUMENT), "encoder")
    return place.write(Embeddings(content_hashes(texts, encoder), vectors.astype("<f2")))


def content_hashes(texts: Sequence[str], encoder: Encoder) -> NDArray[np.uint8]:
    """Hashes (texts, 16) of the encoder, its instruction and the text. Equal hash, equal vector."""
    prefix = f"{encoder.fingerprint}\n{encoder.spec.instruction(Side.DOCUMENT)}\n".encode()
    digests = [blake2b(prefix + text.encode(), digest_size=HASH_BYTES).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, HASH_BYTES)


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def checked(vectors: Vectors, encoder: str) -> Vectors:
    """Raises BadBuild if a vector is NaN or not of length 1; `encoder` names it in the message."""
    norms = np.linalg.norm(vectors, axis=1)
    if not (np.abs(norms - 1) < NORM_TOLERANCE).all():  # also false for NaN
        worst = float(norms[np.argmax(np.nan_to_num(np.abs(norms - 1), nan=np.inf))])
        raise BadBuild(f"the {encoder} gave a vector of length {worst}, not 1; export it again with its norm inside")
    return vectors

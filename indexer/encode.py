"""Texts to unit vectors, shard by shard, each shard in its place as soon as it is encoded.

The encoder is anything with the few members of `Encoder`. Knows nothing of where the texts come from or what becomes
of the vectors.
"""

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
from indexer.store.passages import HASH_BYTES
from indexer.store.shards import Embeddings, Shards
from models.encoder.onnx import Vectors
from models.encoder.spec import EncoderSpec, Precision, Side, Variant
from models.encoder.tokenizer import Tokenizer
from models.progress import Progress

# The graph ends in the norm, so this allows for the arithmetic of int8 and fp16 graphs only.
NORM_TOLERANCE = 1e-2

Item = TypeVar("Item")


class Encoder(Protocol):
    """What the indexer asks of an encoder. Equal `fingerprint`, equal function from text to vector.

    `bulk_texts` is how many texts it likes to get at once.
    """

    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def variant(self) -> Variant | Precision: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def bulk_texts(self) -> int: ...
    def encode(self, texts: Sequence[str], side: Side) -> Vectors: ...


EncodeShards = Callable[[Iterable[list[str]], Encoder, Shards], Iterator[int]]
"""Encodes every list of texts as one shard and writes it; gives the number of its texts when it is in its place."""


def encode_here(shards: Iterable[list[str]], encoder: Encoder, place: Shards) -> Iterator[int]:
    """In this process, one shard after the other; the texts of the next are read meanwhile."""
    waiting = iter(shards)
    with ThreadPoolExecutor(1, "reader") as reader:
        ahead = reader.submit(next, waiting, None)
        while (texts := ahead.result()) is not None:
            ahead = reader.submit(next, waiting, None)
            encode_shard(texts, encoder, place)
            yield len(texts)


@dataclass(frozen=True)
class Work:
    """How texts are encoded: where their shards lie, how many texts make one, and who does it."""

    place: Shards
    shard_texts: int
    encode: EncodeShards = encode_here

    def do(self, texts: Iterable[str], count: int, encoder: Encoder) -> None:
        """Encodes `count` texts.

        A vector may depend a little on the texts beside it (half precision on a card). Shards are cut from the front,
        all but the last of one size, so a build that lost any of them cuts the rest as the first build did and gets
        the same vectors.
        """
        with Progress("encode", "passages", count) as bar:
            for finished in self.encode(chunked(texts, self.shard_texts), encoder, self.place):
                bar.update(finished)


def encode_shard(texts: Sequence[str], encoder: Encoder, place: Shards) -> str:
    """One shard; returns its name when it is in its place."""
    vectors = checked(encoder.encode(texts, Side.DOCUMENT), "encoder")
    return place.write(Embeddings(content_hashes(texts, encoder), vectors.astype("<f2")))


def content_hashes(texts: Sequence[str], encoder: Encoder) -> NDArray[np.uint8]:
    """What names an embedding, (texts, 16): the encoder, its instruction and the text. Equal hash, equal vector."""
    prefix = f"{encoder.fingerprint}\n{encoder.spec.instruction(Side.DOCUMENT)}\n".encode()
    digests = [blake2b(prefix + text.encode(), digest_size=HASH_BYTES).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, HASH_BYTES)


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def checked(vectors: Vectors, encoder: str) -> Vectors:
    """The vectors, unless one of them is none: NaN, or not of length 1; `encoder` is what the reader calls it."""
    norms = np.linalg.norm(vectors, axis=1)
    if not (np.abs(norms - 1) < NORM_TOLERANCE).all():  # also false for NaN
        worst = float(norms[np.argmax(np.nan_to_num(np.abs(norms - 1), nan=np.inf))])
        raise BadBuild(f"the {encoder} gave a vector of length {worst}, not 1; export it again with its norm inside")
    return vectors

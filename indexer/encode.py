"""Reuses or computes the embedding of every passage of a corpus, in shards that are written as they are encoded.

Vectors are known by content hash: from the collection's versions by the same encoder, newest first, then from the
shards of an unfinished build. Only texts that neither has are encoded, each once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from indexer.errors import BadBuild, BadSnapshot
from indexer.store.arrays import Array, Rows, load_array, part_bits, rows_of_part
from indexer.store.collection import Collection
from indexer.store.documents import HASH_BYTES, HASHES_FILE, load_hashes
from indexer.store.kinds import VECTORS_FILE
from indexer.store.manifest import Manifest
from indexer.store.shards import Embeddings, Shard, Shards
from models.encoder.onnx import Vectors
from models.encoder.spec import Computed, EncoderSpec, Side
from models.encoder.tokenizer import Tokenizer
from models.errors import CareError
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
    """Encodes in this process, one shard after the other."""
    for texts in read_ahead(shards):
        encode_shard(texts, encoder, place)
        yield len(texts)


def read_ahead(shards: Iterable[list[str]]) -> Generator[list[str], None, None]:
    """Yields the shards; a thread reads the texts of the next one meanwhile."""
    waiting = iter(shards)
    with ThreadPoolExecutor(1, "reader") as reader:
        ahead = reader.submit(next, waiting, None)
        while (texts := ahead.result()) is not None:
            ahead = reader.submit(next, waiting, None)
            yield texts


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


def reason_of(error: Exception) -> str:
    """Returns the message of an error for another process; prints the traceback of an unexpected one."""
    if isinstance(error, CareError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def content_hashes(texts: Sequence[str], encoder: Encoder) -> NDArray[np.uint8]:
    """Hashes (texts, 16) of the encoder, its instruction and the text. Equal hash, equal vector."""
    prefix = f"{encoder.fingerprint}\n{encoder.spec.instruction(Side.DOCUMENT)}\n".encode()
    digests = [blake2b(prefix + text.encode(), digest_size=HASH_BYTES).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, HASH_BYTES)


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yields lists of `size` items, the last one shorter."""
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


BLOCK = 8192

TextsOf = Callable[[Rows], Iterable[str]]
"""The texts of passage rows."""


def embed(
    hashes: Array, texts_of: TextsOf, encoder: Encoder, collection: Collection, work: Work
) -> tuple[Reuse, int, int]:
    """Returns every passage's vector, how many texts were encoded, and how many passages had a known vector."""
    reuse = Reuse(hashes)
    for embeddings in _versions(collection, encoder):
        if not reuse.show([embeddings]):
            return reuse, 0, len(hashes)
    reused = len(hashes) - reuse.show(list(work.place.read(encoder.spec.dim)))
    missing = reuse.missing()
    if len(missing):
        work.do(texts_of(missing), len(missing), encoder)
        # Read back rather than remembered: what is used is what the disk has.
        if reuse.show(list(work.place.read(encoder.spec.dim))):
            raise BadBuild(
                f"{work.place}: what was just written reads back differently; check the disk, then build again"
            )
    return reuse, len(missing), reused


def _versions(collection: Collection, encoder: Encoder) -> Iterator[Embeddings]:
    """Yields the embeddings of every sound version by this encoder, newest first."""
    for version in reversed(collection.versions()):
        folder = collection.folder(version)
        try:
            manifest = Manifest.read(folder)
            if manifest.encoder.fingerprint != encoder.fingerprint:
                continue
            manifest.verify_files(folder, (HASHES_FILE, VECTORS_FILE))
            passages = manifest.counts.passages
            vectors = load_array(folder / VECTORS_FILE, "<f2", (passages, manifest.dim))
            yield Embeddings(load_hashes(folder, passages), vectors)
        except BadSnapshot:  # what a damaged version had is encoded again
            continue


class Reuse:
    """Finds vectors by `hashes` (passages, 16) uint8 among embeddings that it is shown; holds 8 bytes a passage."""

    def __init__(self, hashes: Array) -> None:
        self._keys = _as_numbers(hashes)
        self._bits = part_bits(len(hashes))
        self._known: list[Embeddings | Shard] = []
        # Which embeddings have the passage's vector, −1: none, and in which row.
        self._owners = np.full(len(hashes), -1, dtype=np.int32)
        self._rows = np.zeros(len(hashes), dtype=np.int32)

    def show(self, known: Sequence[Embeddings | Shard]) -> int:
        """Takes vectors for passages that lack one, the first of equal ones; returns how many still lack one."""
        for part, rows in self._parts_without_vector() if known else ():
            # All of them joined at once: one after the other would take time with the square of the corpus.
            keys, owners, theirs = self._gather(known, part)
            places = _find(self._keys[rows], keys)
            found, places = rows[places >= 0], places[places >= 0]
            self._owners[found], self._rows[found] = owners[places], theirs[places]
        self._known.extend(known)
        return int(np.count_nonzero(self._owners < 0))

    def missing(self) -> Rows:
        """Returns the first passage row, ascending, of each distinct content without a vector."""
        firsts = []
        for _, rows in self._parts_without_vector():
            keys = self._keys[rows]
            order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: of equal keys the first stays first
            new = np.ones(len(keys), dtype=np.bool_)
            new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
            firsts.append(rows[order[new]])
        return np.sort(np.concatenate(firsts)) if firsts else np.empty(0, dtype=np.int64)

    def vectors(self) -> Iterator[Array]:
        """Yields the vectors of all passages in row order, in blocks (any number, dim) float16; none may be missing."""
        for start in range(0, len(self._owners), BLOCK):
            owners, rows = self._owners[start : start + BLOCK], self._rows[start : start + BLOCK]
            block = np.empty((len(owners), self._known[0].vectors.shape[1]), dtype="<f2")
            for number in np.unique(owners).tolist():
                if number < 0:
                    raise ValueError(f"a passage among {start} … {start + len(owners)} has no vector")
                block[owners == number] = self._known[number].vectors[rows[owners == number]]
            yield block

    def _gather(self, known: Sequence[Embeddings | Shard], part: int) -> tuple[Array, Array, Array]:
        """Returns the keys of one part in all of `known`, and of each key which embeddings have it and in which row."""
        keys, owners, rows = [], [], []
        for number, embeddings in enumerate(known, start=len(self._known)):
            theirs = _as_numbers(embeddings.hashes)
            rows.append(rows_of_part(theirs[:, 0], self._bits, part))
            keys.append(theirs[rows[-1]])
            owners.append(np.full(len(rows[-1]), number))
        return np.concatenate(keys), np.concatenate(owners), np.concatenate(rows)

    def _parts_without_vector(self) -> Iterator[tuple[int, Rows]]:
        for part in range(1 << self._bits):
            rows = rows_of_part(self._keys[:, 0], self._bits, part)
            rows = rows[self._owners[rows] < 0]
            if len(rows):
                yield part, rows


def _as_numbers(hashes: Array) -> Array:
    """Hashes (rows, 16) uint8 as (rows, 2) uint64, without a copy."""
    return hashes.view("<u8")


def _find(wanted: Array, keys: Array) -> Rows:
    """Finds for each row of `wanted` an equal row of `keys`, −1: none; both (rows, 2) uint64."""
    order = np.argsort(keys[:, 0], kind="stable")
    firsts, seconds = keys[order, 0], keys[order, 1]
    found = np.full(len(wanted), -1, dtype=np.int64)
    pending = np.arange(len(wanted))
    places = np.searchsorted(firsts, wanted[:, 0])
    # Keys that share their first half are neighbours; as a rule there is one.
    while len(pending := pending[places[pending] < len(keys)]):
        pending = pending[firsts[places[pending]] == wanted[pending, 0]]
        equal = seconds[places[pending]] == wanted[pending, 1]
        found[pending[equal]] = order[places[pending[equal]]]
        pending = pending[~equal]
        places[pending] += 1
    return found

"""Passages to unit vectors, chunk by chunk, with a progress bar. Knows nothing of where the texts come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from indexer.errors import BadBuild
from indexer.store.passages import HASH_BYTES
from models.onnx_encoder import BULK_TOKENS, OnnxEncoder, Vectors, bulk_batches
from models.spec import Side

# Sorting by length works within a chunk: large enough for batches of like lengths, small enough to hold in memory.
CHUNK = 4096
# The graph ends in the norm, so this allows for the arithmetic of int8 and fp16 graphs only.
NORM_TOLERANCE = 1e-2

Item = TypeVar("Item")


def encode_passages(texts: Iterable[str], encoder: OnnxEncoder, vectors: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Fills `vectors` (passages, dim) with the embeddings of as many texts; returns their content hashes.

    Refuses an embedding that is not a finite unit vector.
    """
    hashes = np.empty((len(vectors), HASH_BYTES), dtype=np.uint8)
    start = 0
    # disable=None: no bar where standard error is not a terminal.
    with tqdm(total=len(vectors), desc="encode", unit=" passages", disable=None) as bar:
        for chunk in chunked(texts, CHUNK):
            tokens = encoder.tokenize(chunk, Side.DOCUMENT)
            for rows in bulk_batches([len(t) for t in tokens], BULK_TOKENS):
                vectors[[start + row for row in rows]] = _checked(encoder.encode_tokens([tokens[row] for row in rows]))
                bar.update(len(rows))
            hashes[start : start + len(chunk)] = content_hashes(chunk, encoder)
            start += len(chunk)
    if start != len(vectors):
        raise ValueError(f"{start} texts for {len(vectors)} vectors")
    return hashes


def content_hashes(texts: Sequence[str], encoder: OnnxEncoder) -> NDArray[np.uint8]:
    """What names an embedding, (texts, 16): the encoder, its instruction and the text. Equal hash, equal vector."""
    prefix = f"{encoder.fingerprint}\n{encoder.spec.instruction(Side.DOCUMENT)}\n".encode()
    digests = [blake2b(prefix + text.encode(), digest_size=HASH_BYTES).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, HASH_BYTES)


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _checked(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1)
    if not (np.abs(norms - 1) < NORM_TOLERANCE).all():  # also false for NaN
        worst = float(norms[np.argmax(np.nan_to_num(np.abs(norms - 1), nan=np.inf))])
        raise BadBuild(f"the encoder gave a vector of length {worst}, not 1; export it again with its norm inside")
    return vectors

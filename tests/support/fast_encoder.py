"""A stand-in for an encoder: as cheap as a hash, so that tests and benchmarks of the indexer measure the indexer.

Its vectors have no meaning. The tokenizer is that of the bundled encoder, so passages are cut as in production.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from models.encoder.onnx import Vectors
from models.encoder.spec import TOKENIZER_FILE, EncoderSpec, Side, Variant
from models.encoder.tokenizer import Tokenizer

BUNDLED = Path("models/pretrained/care-small-zh")
DIM = 64


class FastEncoder:
    """Counts texts in `count`, and records them in `texts` if `remember` is set.

    With `swayed`, a vector depends a little on the other texts of its batch, as with an int8 encoder.
    """

    def __init__(
        self, fingerprint: str = "fast", instruction: str = "", *, remember: bool = True, swayed: bool = False
    ) -> None:
        changes = {"dim": DIM, "document_instruction": instruction}
        self.spec = EncoderSpec.load(BUNDLED).model_copy(update=changes)
        self.variant = Variant.FP32
        self.bulk_texts = 1024
        self.fingerprint = fingerprint
        self.tokenizer = Tokenizer.load(BUNDLED / TOKENIZER_FILE, self.spec.max_length)
        self.texts: list[str] = []
        self.count = 0
        self._remember = remember
        self._swayed = swayed

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        self.count += len(texts)
        if self._remember:
            self.texts.extend(texts)
        key = f"{self.fingerprint}{self.spec.instruction(side)}".encode()[:DIM]
        digests = b"".join(blake2b(text.encode(), digest_size=DIM, key=key).digest() for text in texts)
        vectors = np.frombuffer(digests, dtype=np.int8).reshape(-1, DIM).astype(np.float32)
        if self._swayed:
            vectors += np.frombuffer(blake2b(digests, digest_size=DIM).digest(), dtype=np.int8) / np.float32(16)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class FailingEncoder(FastEncoder):
    """Fails at the shard after the first `shards`."""

    def __init__(self, shards: int) -> None:
        super().__init__(swayed=True)
        self._left = shards

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return super().encode(texts, side)

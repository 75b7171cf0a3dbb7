"""A stand-in for an encoder: as cheap as a hash, so that tests and benchmarks of the indexer measure the indexer.

Its vectors say nothing about the texts. The tokenizer is the bundled encoder's, so passages are cut as in earnest.
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
    """Counts what it reads: `texts` is every text, in order, if `remember`, and `count` how many in any case.

    With `swayed`, a vector depends a little on the texts that are encoded with it, as an int8 encoder's does.
    """

    def __init__(
        self, fingerprint: str = "fast", instruction: str = "", *, remember: bool = True, swayed: bool = False
    ) -> None:
        changes = {"dim": DIM, "document_instruction": instruction}
        self.spec = EncoderSpec.load(BUNDLED).model_copy(update=changes)
        self.variant = Variant.FP32
        self.weights = self.variant.filename
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

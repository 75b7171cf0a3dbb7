"""Reads documents with two encoders: their vectors stand side by side and become one of the space.

The larger one knows more, the smaller one keeps what queries by the same small network are good at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from models.encoder.packed.encoder import PackedEncoder
from models.encoder.spec import (
    BESIDE,
    JOIN_FILE,
    SPEC_FILE,
    Beside,
    EncoderSpec,
    Precision,
    Side,
    sha256_of,
    verify_file,
)
from models.encoder.torch import Vectors, weight_files
from models.errors import BadEncoder

Matrix = NDArray[np.float32]
WEIGHT, CHECK = "weight", "check"
"""Tensors of `join.safetensors`: the matrix, and the second encoder's vectors of the first check texts."""


class JoinedEncoder:
    """What the indexer asks of an encoder (`indexer.encode.Encoder`); not for several threads at once."""

    def __init__(
        self, spec: EncoderSpec, fingerprint: str, parts: tuple[PackedEncoder, PackedEncoder], matrix: Matrix
    ) -> None:
        assert spec.beside is not None
        self.spec, self.fingerprint = spec, fingerprint
        self._parts, self._matrix, self._share = parts, matrix, spec.beside.share
        self.variant, self.tokenizer, self.bulk_texts = parts[0].variant, parts[0].tokenizer, parts[0].bulk_texts

    @classmethod
    def load(
        cls, folder: Path, spec: EncoderSpec, *, device: str | None = None, precision: Precision | None = None,
        token_budget: int | None = None, threads: int = 0,
    ) -> JoinedEncoder:  # fmt: skip
        """Opens and verifies the folder of two; `spec` is its own, or one with other instructions."""
        assert spec.beside is not None
        own = EncoderSpec.load(folder)
        plain = {"query_instruction": "", "document_instruction": ""}
        small = EncoderSpec.load(verify_file(folder, f"{BESIDE}/{SPEC_FILE}", own).parent).model_copy(update=plain)
        matrix = load_file(verify_file(folder, JOIN_FILE, own))[WEIGHT]
        if matrix.shape != (spec.beside.dim + small.dim, spec.dim):
            raise BadEncoder(f"{folder / JOIN_FILE}: the matrix is of shape {matrix.shape}, which {SPEC_FILE} denies")
        options = {"device": device, "precision": precision, "token_budget": token_budget, "threads": threads}
        first = PackedEncoder.load(folder, alone(spec), **options)  # type: ignore[arg-type]
        second = PackedEncoder.load(folder / BESIDE, small, **options)  # type: ignore[arg-type]
        files = (*weight_files(folder), f"{BESIDE}/{SPEC_FILE}")
        return cls(spec, own.fingerprint(*files, computed=first.fingerprint), (first, second), matrix)

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Returns unit vectors (texts, dim) in the order given."""
        return join([part.encode(texts, side) for part in self._parts], self._share, self._matrix)

    def encode_prompts(self, prompts: Sequence[str], instructions: Sequence[str]) -> Vectors:
        """As `encode`, of texts that begin with one of these instructions, which the second encoder does not read."""
        bare = [_without(prompt, instructions) for prompt in prompts]
        found = [part.encode(texts, Side.DOCUMENT) for part, texts in zip(self._parts, (prompts, bare), strict=True)]
        return join(found, self._share, self._matrix)


def alone(spec: EncoderSpec) -> EncoderSpec:
    """Returns the spec of the first encoder of two, or of the only one."""
    if spec.beside is None:
        return spec
    return spec.model_copy(update={"native_dim": spec.beside.native_dim, "dim": spec.beside.dim, "beside": None})


def put_beside(folder: Path, share: float, dim: int, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Makes one encoder of the folder's own and of the one that lies in its `beside`."""
    save_file(dict(tensors), folder / JOIN_FILE)
    spec = EncoderSpec.load(folder)
    new = {name: sha256_of(folder / name) for name in (JOIN_FILE, f"{BESIDE}/{SPEC_FILE}")}
    pooling = EncoderSpec.load(folder / BESIDE).pooling
    beside = Beside(share=share, native_dim=spec.native_dim, dim=spec.dim, pooling=pooling)
    changes = {"native_dim": dim, "dim": dim, "beside": beside, "checksums": spec.checksums | new}
    spec.model_copy(update=changes).save(folder)


def open_packed(folder: Path, spec: EncoderSpec | None = None, **options: Any) -> PackedEncoder | JoinedEncoder:  # noqa: ANN401
    """Opens a folder of one encoder or of two, with the options of `PackedEncoder.load`."""
    spec = spec or EncoderSpec.load(folder)
    return (PackedEncoder if spec.beside is None else JoinedEncoder).load(folder, spec, **options)


def _without(prompt: str, instructions: Sequence[str]) -> str:
    return next((prompt.removeprefix(each) for each in instructions if each and prompt.startswith(each)), prompt)


def join(parts: Sequence[Vectors], share: float, matrix: Matrix) -> Vectors:
    """Returns unit vectors (texts, dim) of the unit vectors of two encoders."""
    vectors = side_by_side(parts, share) @ matrix
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def side_by_side(parts: Sequence[Vectors], share: float) -> Vectors:
    """Returns vectors whose inner products are means of the two encoders' cosines."""
    first, second = parts
    return np.hstack([np.float32(np.sqrt(1 - share)) * first, np.float32(np.sqrt(share)) * second])


def fit(parts: Sequence[Vectors], share: float, dim: int) -> Matrix:
    """Returns the matrix (dimensions of both, dim) that keeps the most of inner products between such texts."""
    vectors = side_by_side(parts, share).astype(np.float64)
    _, directions = np.linalg.eigh(vectors.T @ vectors)  # by ascending weight
    return np.ascontiguousarray(directions[:, ::-1][:, :dim], dtype=np.float32)

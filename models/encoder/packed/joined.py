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
from models.encoder.packed.hubs import Hubs
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
"""Tensors of `join.safetensors`: the matrix, and the second encoder's vectors of the first check texts.

Those of `hubs` may be there, too.
"""


class JoinedEncoder:
    """What the indexer asks of an encoder (`indexer.encode.Encoder`); not for several threads at once."""

    def __init__(
        self, spec: EncoderSpec, fingerprint: str, first: PackedEncoder, second: PackedEncoder, matrix: Matrix,
        hubs: Hubs | None,
    ) -> None:  # fmt: skip
        assert spec.beside is not None
        self.spec, self.fingerprint = spec, fingerprint
        self._first, self._second, self._share = first, second, spec.beside.share
        self._matrix, self._hubs = matrix, hubs
        self.variant, self.tokenizer, self.bulk_texts = first.variant, first.tokenizer, first.bulk_texts

    @classmethod
    def load(
        cls, folder: Path, spec: EncoderSpec, *, device: str | None = None, precision: Precision | None = None,
        token_budget: int | None = None, threads: int = 0,
    ) -> JoinedEncoder:  # fmt: skip
        """Opens and verifies the folder of two; `spec` is its own, or one without instructions if texts have them."""
        assert spec.beside is not None
        own = EncoderSpec.load(folder)
        small = EncoderSpec.load(verify_file(folder, f"{BESIDE}/{SPEC_FILE}", own).parent).without_instructions()
        tensors = load_file(verify_file(folder, JOIN_FILE, own))
        matrix = tensors[WEIGHT]
        if matrix.shape != (spec.beside.dim + small.dim, spec.dim):
            raise BadEncoder(f"{folder / JOIN_FILE}: the matrix of shape {matrix.shape} does not fit {SPEC_FILE}")
        options = {"device": device, "precision": precision, "token_budget": token_budget, "threads": threads}
        first = PackedEncoder.load(folder, alone(spec), **options)  # type: ignore[arg-type]
        second = PackedEncoder.load(folder / BESIDE, small, **options)  # type: ignore[arg-type]
        files = (*weight_files(folder), JOIN_FILE, f"{BESIDE}/{SPEC_FILE}")
        fingerprint = own.fingerprint(*files, computed=first.fingerprint)
        return cls(spec, fingerprint, first, second, matrix, Hubs.read(tensors))

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Returns unit vectors (texts, dim) in the order given."""
        return self.joined(self.parts(texts, side), side)

    def parts(self, texts: Sequence[str], side: Side, prompt: str = "") -> Vectors:
        """Returns the unit vectors of both encoders in one row (texts, dimensions of both).

        The second encoder reads no instruction: it leaves out the prompt, with which all texts then begin.
        """
        bare = [text.removeprefix(prompt) for text in texts] if prompt else texts
        return np.hstack([self._first.encode(texts, side), self._second.encode(bare, side)])

    def joined(self, parts: Vectors, side: Side, share: float | None = None) -> Vectors:
        """Returns unit vectors (texts, dim) of `parts`, with another share of the second encoder if one is given."""
        first = self._first.spec.dim
        found = join((parts[:, :first], parts[:, first:]), self._share if share is None else share, self._matrix)
        return found if self._hubs is None or side is Side.QUERY else self._hubs.moved(found)

    @property
    def parts_dim(self) -> int:
        return self._first.spec.dim + self._second.spec.dim

    @property
    def parts_fingerprint(self) -> str:
        """Identifies the function that computes `parts`, which depends on neither the share nor the matrix."""
        return f"{self._first.fingerprint}-{self._second.fingerprint}"


def alone(spec: EncoderSpec) -> EncoderSpec:
    """Returns the spec of the first encoder of two, or of the only one."""
    if spec.beside is None:
        return spec
    return spec.model_copy(update={"native_dim": spec.beside.native_dim, "dim": spec.beside.dim, "beside": None})


def put_beside(folder: Path, share: float, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Joins the encoder of a folder with the one in its subfolder `beside`."""
    save_file(dict(tensors), folder / JOIN_FILE)
    spec = EncoderSpec.load(folder)
    new = {name: sha256_of(folder / name) for name in (JOIN_FILE, f"{BESIDE}/{SPEC_FILE}")}
    pooling = EncoderSpec.load(folder / BESIDE).pooling
    beside = Beside(share=share, native_dim=spec.native_dim, dim=spec.dim, pooling=pooling)
    dim = tensors[WEIGHT].shape[1]
    changes = {"native_dim": dim, "dim": dim, "beside": beside, "checksums": spec.checksums | new}
    spec.model_copy(update=changes).save(folder)


def open_packed(folder: Path, spec: EncoderSpec | None = None, **options: Any) -> PackedEncoder | JoinedEncoder:  # noqa: ANN401
    """Opens a folder of one encoder or of two, with the options of `PackedEncoder.load`."""
    spec = spec or EncoderSpec.load(folder)
    return (PackedEncoder if spec.beside is None else JoinedEncoder).load(folder, spec, **options)


def join(parts: Sequence[Vectors], share: float, matrix: Matrix) -> Vectors:
    """Returns unit vectors (texts, dim) of the unit vectors of two encoders."""
    vectors = side_by_side(parts, share) @ matrix
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def side_by_side(parts: Sequence[Vectors], share: float) -> Vectors:
    """Returns vectors whose inner products are means of the two encoders' cosines."""
    first, second = parts
    return np.hstack([np.float32(np.sqrt(1 - share)) * first, np.float32(np.sqrt(share)) * second])


def basis(columns: Matrix, moments: NDArray[np.float64], dim: int) -> Matrix:
    """Returns at most `dim` orthonormal columns of the space of these, the ones that vary most first.

    `moments` are the products of side-by-side vectors, summed over texts. A query whose vector is a combination of the
    columns has the same inner products with vectors that are multiplied by such a basis.
    """
    span, _ = np.linalg.qr(columns.astype(np.float64))
    _, turn = np.linalg.eigh(span.T @ moments @ span)  # by ascending weight
    return np.ascontiguousarray((span @ turn[:, ::-1])[:, :dim], dtype=np.float32)

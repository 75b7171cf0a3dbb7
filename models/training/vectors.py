"""Vectors of encoders that are not being trained: read once, kept on disk, never mistaken for another encoder's.

A file is named by the encoder's fingerprint and the texts; texts are read in chunks of like lengths, and a chunk that
was written is not read again, so that a run that was killed goes on. Several ranks share the chunks. On a graphics
card a frozen decoder reads them packed, as the indexer does.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.errors import BadEncoder
from models.packed.attention import default_backend
from models.packed.decoder import PackedDecoder
from models.packed.layout import lay_out
from models.packed.weights import read_weights
from models.progress import Progress
from models.spec import Pooling
from models.torch_encoder import TorchEncoder, finish
from models.training.gradients import autocast
from models.training.ranks import Ranks
from models.training.tables import Rows, Texts, TokenTable

Kept = NDArray[np.float16]


# Compiling takes some seconds: fewer tokens would not win them back. A guess, not measured.
COMPILED_TOKENS = 5_000_000


class Reader:
    """One encoder as it is now, reading texts without a graph."""

    def __init__(self, encoder: TorchEncoder, ranks: Ranks, *, tokens: int, precision: str) -> None:
        self._encoder, self._ranks, self._tokens, self._precision = encoder, ranks, tokens, precision
        self._packed: PackedDecoder | None = None

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def pack(self, table: TokenTable) -> None:
        """From now on reads without padding, if models.packed knows the decoder and its weights are bf16 already."""
        encoder, weight = self._encoder, next(self._encoder.parameters())
        if encoder.spec.pooling is not Pooling.EOS or encoder.projection is not None or weight.dtype != torch.bfloat16:
            return
        try:
            weights = read_weights(encoder.backbone, encoder.spec.max_length, weight.device)
        except BadEncoder:  # another architecture
            return
        compiled = weight.is_cuda and int(table.lengths.sum()) > COMPILED_TOKENS
        self._packed = PackedDecoder(weights, default_backend(weight.device), compiled=compiled)

    @torch.inference_mode()
    def vectors(self, table: TokenTable, rows: Rows) -> Tensor:
        """Finished vectors (rows, dim) in float32 on the device, whatever mode the encoder is in."""
        if self._packed is not None:
            hidden = self._packed(lay_out(table.flat(rows), table.lengths[rows]))
            return finish(hidden.float(), self._encoder.spec)
        was_training = self._encoder.training
        self._encoder.eval()
        with autocast(self._ranks.device, self._precision):
            pooled = self._encoder.pooled(*table.padded(rows), padded_right=True)
        self._encoder.train(was_training)
        return finish(pooled, self._encoder.spec)

    def all(self, table: TokenTable) -> NDArray[np.float32]:
        """The vectors of a whole table; every rank reads its share and gets all."""
        found = torch.zeros(len(table), self._encoder.spec.dim, device=self._ranks.device)
        chunks = table.chunks(np.arange(len(table)), self._tokens)
        for place in self._ranks.share(len(chunks)):
            found[torch.from_numpy(chunks[place]).to(found.device)] = self.vectors(table, chunks[place])
        return self._ranks.sum(found).cpu().numpy()

    def keep(self, table: TokenTable, path: Path) -> Kept:
        """The vectors of a whole table in a file (texts, dim), float16, mapped; read by all ranks together."""
        if self._ranks.device.type == "cuda":
            self.pack(table)
        chunks = table.chunks(np.arange(len(table)), self._tokens)
        shape = (len(table), self._encoder.spec.dim)
        part, done = path.with_suffix(".part"), path.with_suffix(".done")
        if self._ranks.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            _allocate(part, 2 * shape[0] * shape[1])
            _allocate(done, len(chunks))
        self._ranks.wait()
        values = np.memmap(part, dtype=np.float16, mode="r+", shape=shape)
        marks = np.memmap(done, dtype=np.uint8, mode="r+", shape=(len(chunks),))
        self._fill(table, chunks, values, marks)
        values.flush()
        self._ranks.wait()
        if self._ranks.is_first:
            os.replace(part, path)
            done.unlink()
        self._ranks.wait()
        return kept_in(path, *shape)

    def _fill(self, table: TokenTable, chunks: list[Rows], values: Kept, marks: NDArray[np.uint8]) -> None:
        own = [place for place in self._ranks.share(len(chunks)) if not marks[place]]
        what, quiet = f"encode {len(table):,} texts once", not self._ranks.is_first
        for place in Progress(what, "chunks", len(own), quiet=quiet).over(own):
            values[chunks[place]] = self.vectors(table, chunks[place]).half().cpu().numpy()
            marks[place] = 1


def file_of(folder: Path, fingerprint: str, texts: Texts) -> Path:
    """Where the vectors of these texts by this encoder are kept."""
    digest = hashlib.blake2b(f"{fingerprint} {texts.side}".encode(), digest_size=12)
    for row, text in enumerate(texts.texts):
        given = texts.instructions[row] if texts.instructions is not None else None
        # Lengths keep two lists apart whose texts join to the same bytes.
        content = repr((given, text)).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return folder / f"{digest.hexdigest()}.f16"


def kept_in(path: Path, texts: int, dim: int) -> Kept:
    """The vectors of a finished file."""
    return np.memmap(path, dtype=np.float16, mode="r", shape=(texts, dim))


def take(kept: Kept, rows: Rows, device: torch.device) -> Tensor:
    """Rows of kept vectors in float32 on the device."""
    return torch.from_numpy(np.asarray(kept[rows])).to(device).float()


def _allocate(path: Path, size: int) -> None:
    """A file of this size whose room is sure: a full disk shows here, not in the middle of a mapped write."""
    if path.is_file() and path.stat().st_size == size:
        return
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)

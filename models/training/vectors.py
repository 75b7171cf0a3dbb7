"""Reads texts with encoders as they are, without gradients: once, for vectors are kept on disk."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.encoder.packed.attention import default_backend
from models.encoder.packed.encoder import PackedModel
from models.encoder.packed.kernels import lay_out, send
from models.encoder.packed.weights import read_weights
from models.encoder.torch import TorchEncoder, finish
from models.errors import BadEncoder, CareError
from models.progress import Progress
from models.training.encoders import EncoderStore
from models.training.kept import KEYS, Kept, Shelf, allocate
from models.training.passes import TokenTable, autocast, take
from models.training.ranks import Ranks
from models.training.texts import Rows, Texts

READ_TOKENS = 32768
# Compiling takes half a minute on an H200: fewer tokens would not win it back.
COMPILED_TOKENS = 30_000_000
# Enough for a matrix of some thousand rows and columns.
FITTED_TEXTS = 65_536
RIDGE = 1e-3


class Reader:
    """One encoder as it is now, reading texts without a graph."""

    def __init__(self, encoder: TorchEncoder, ranks: Ranks, *, tokens: int, precision: str) -> None:
        self.encoder, self.ranks, self.tokens, self._precision = encoder, ranks, tokens, precision
        self._packed: PackedModel | None = None

    def pack(self, table: TokenTable) -> None:
        """Switches to reading without padding, if the architecture is known and its weights are bf16."""
        encoder, weight = self.encoder, next(self.encoder.parameters())
        if weight.dtype != torch.bfloat16:
            return
        try:
            weights = read_weights(encoder.backbone, encoder.spec.max_length, weight.device)
        except BadEncoder:  # another architecture
            return
        if encoder.projection is not None:
            encoder.projection.float()
        compiled = weight.is_cuda and int(table.lengths.sum()) > COMPILED_TOKENS
        backend = default_backend(weight.device)
        self._packed = PackedModel(weights, backend, encoder.spec.pooling, compiled=compiled)

    @torch.inference_mode()
    def vectors(self, table: TokenTable, rows: Rows) -> Tensor:
        """Finished vectors (rows, dim) in float32 on the device, whatever mode the encoder is in."""
        if self._packed is not None:
            hidden = self._packed(lay_out(table.flat(rows), table.lengths[rows])).float()
            projection = self.encoder.projection
            return finish(hidden if projection is None else projection(hidden), self.encoder.spec)
        return finish(self.pooled(table, rows), self.encoder.spec)

    @torch.inference_mode()
    def pooled(self, table: TokenTable, rows: Rows) -> Tensor:
        """Returns vectors (rows, native_dim) as they are before they are cut and normalised."""
        was_training = self.encoder.training
        self.encoder.eval()
        with autocast(self.ranks.device, self._precision):
            pooled = self.encoder.pooled(*table.padded(rows), padded_right=True)
        self.encoder.train(was_training)
        return pooled

    def read(self, texts: Texts) -> Tensor:
        """Returns vectors (texts, dim) of texts, on the CPU."""
        table = TokenTable.build(texts, self.encoder.spec, self.encoder.tokenizer, self.ranks)
        return torch.from_numpy(self.all(table))

    def all(self, table: TokenTable) -> NDArray[np.float32]:
        """Returns the vectors of a whole table; every rank reads its share and gets all."""
        found = torch.zeros(len(table), self.encoder.spec.dim, device=self.ranks.device)
        chunks = table.chunks(np.arange(len(table)), self.tokens)
        for place in self.ranks.share(len(chunks)):
            found[send(chunks[place], found.device)] = self.vectors(table, chunks[place])
        return self.ranks.sum(found).cpu().numpy()

    def keep(self, texts: Texts, path: Path, scratch: Path | None = None) -> None:
        """Writes the vectors of texts to a file (texts, dim), float16, and their keys beside it; all ranks read.

        Token ids are in files at `scratch`.
        """
        encoder, ranks, shape = self.encoder, self.ranks, (len(texts), self.encoder.spec.dim)
        part, done = path.with_suffix(".part"), path.with_suffix(".done")
        if ranks.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            if allocate(part, 2 * shape[0] * shape[1]):
                done.unlink(missing_ok=True)  # its marks are of values that are gone
            allocate(done, len(texts))
        ranks.wait()
        values = np.memmap(part, dtype=np.float16, mode="r+", shape=shape)
        marks = np.memmap(done, dtype=np.uint8, mode="r+", shape=shape[:1])
        missing = np.flatnonzero(marks == 0)
        ranks.wait()  # all ranks have seen the same marks
        if len(missing):
            table = TokenTable.build(texts.take(missing), encoder.spec, encoder.tokenizer, ranks, scratch)
            if ranks.device.type == "cuda":
                self.pack(table)
            chunks = table.chunks(np.arange(len(table)), self.tokens)
            own, what = ranks.share(len(chunks)), f"encode {len(table):,} texts once"
            for place in Progress(what, "chunks", len(own), quiet=not ranks.is_first).over(own):
                rows = missing[chunks[place]]
                values[rows] = self.vectors(table, chunks[place]).half().cpu().numpy()
                marks[rows] = 1
        values.flush()
        ranks.wait()
        if ranks.is_first:
            done.unlink()
            os.replace(part, path)
            texts.keys.tofile(path.with_suffix(KEYS))
        ranks.wait()


@torch.no_grad()
def fit_projection(reader: Reader, table: TokenTable, targets: Kept | Tensor) -> None:
    """Sets an encoder's projection to the linear map of its features that comes closest to these targets.

    Dimensions that the targets do not have stay as they are.
    """
    encoder, ranks = reader.encoder, reader.ranks
    assert encoder.projection is not None
    projection, encoder.projection = encoder.projection, None
    some = spread(len(table), FITTED_TEXTS)
    width, dim = projection.in_features, targets.shape[1]
    products = torch.zeros(width, width + dim, dtype=torch.float64, device=ranks.device)
    for chunk in table.chunks(some, reader.tokens):
        features = nn.functional.normalize(projection.features(reader.pooled(table, some[chunk])), dim=-1)
        both = torch.cat([features, take(targets, some[chunk], ranks.device)], dim=1)
        products += features.double().T @ both.double()
    own, shared = products[:, :width], products[:, width:]
    ridge = RIDGE * own.diagonal().mean() * torch.eye(width, dtype=torch.float64, device=ranks.device)
    # Each rank computes all of it; equal weights matter more than the last digit.
    found = torch.linalg.solve(own + ridge, shared).T.to(projection.weight)
    projection.weight[:dim].copy_(ranks.sum(found if ranks.is_first else torch.zeros_like(found)))
    encoder.projection = projection


def read_once(
    name: str, texts: Texts, store: EncoderStore, scratch: Path, tokens: int = READ_TOKENS, precision: str = "bf16"
) -> Kept:
    """Returns the vectors of texts by an encoder as it is now, or of the two that are joined; none is read twice."""
    beside, kept = store.recipe.encoders[name].beside, _read_alone(name, texts, store, scratch, tokens, precision)
    if beside is None:
        return kept
    kept = kept.beside(_read_alone(beside.encoder, texts, store, scratch, tokens, precision), beside.share)
    if store.ranks.is_first and not store.moments.is_file():
        _write_moments(kept, store)
    store.ranks.wait()
    return kept


def _write_moments(kept: Kept, store: EncoderStore) -> None:
    """Writes the products of some side-by-side vectors, by the first texts that a run reads."""
    rows = spread(len(kept), FITTED_TEXTS)
    some, new = take(kept, rows, store.ranks.device).double(), store.moments.with_suffix(".new.npy")
    new.parent.mkdir(parents=True, exist_ok=True)
    np.save(new, (some.T @ some).cpu().numpy())
    new.replace(store.moments)


def _read_alone(name: str, texts: Texts, store: EncoderStore, scratch: Path, tokens: int, precision: str) -> Kept:
    ranks, texts = store.ranks, store.asked_of(name, texts)
    shelf = Shelf(store.vectors, _function(name, store, precision), texts.side, store.recipe.part_of(name))
    known = shelf.find(texts)
    if not ranks.any(len(known.missing) > 0):
        return known
    with shelf.locked() if ranks.is_first else nullcontext():
        ranks.wait()
        missing = shelf.find(texts).missing  # another run may have read some in the meantime
        ranks.wait()  # all ranks have looked before one writes
        if len(missing):
            reader = Reader(store.open(name, trained=False), ranks, tokens=tokens, precision=precision)
            unread = texts.take(missing)
            path = shelf.file_for(unread)
            reader.keep(unread, path, scratch / path.stem)
    found = shelf.find(texts)
    if len(found.missing):
        raise CareError(f"{store.vectors}: vectors are gone that were there a moment ago; run the same command again")
    return found


def _function(name: str, store: EncoderStore, precision: str) -> str:
    """Identifies how an encoder computes vectors; runs that share a folder may compute differently."""
    return f"{store.fingerprint(name)} {store.recipe.encoders[name].dtype} {precision}"


def spread(count: int, most: int) -> Rows:
    """Returns at most `most` of `count` rows, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)

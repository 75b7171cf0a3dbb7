"""Vectors of encoders as they are, without gradients: read once and kept on disk, alone or joined.

A file is named by encoder and texts. What one has written, for this file or another of the folder, is not read again.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.encoder.packed.attention import default_backend
from models.encoder.packed.encoder import PackedModel
from models.encoder.packed.kernels import lay_out
from models.encoder.packed.weights import read_weights
from models.encoder.torch import TorchEncoder, finish
from models.errors import BadEncoder
from models.progress import Progress
from models.training.encoders import EncoderStore
from models.training.passes import Kept, TokenTable, autocast, take
from models.training.ranks import Ranks
from models.training.tables import Rows, Texts

READ_TOKENS = 32768
# Compiling takes half a minute on an H200: fewer tokens would not win it back.
COMPILED_TOKENS = 30_000_000
# Enough for a matrix of some thousand rows and columns.
FITTED_TEXTS = 65_536
RIDGE = 1e-3
KEYS = ".keys"


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
            found[torch.from_numpy(chunks[place]).to(found.device)] = self.vectors(table, chunks[place])
        return self.ranks.sum(found).cpu().numpy()

    def keep(self, texts: Texts, path: Path, scratch: Path | None = None) -> Kept:
        """Returns the vectors of texts in a file (texts, dim), float16, mapped; read by all ranks together.

        Texts that the encoder has read for another file of the folder are copied. Token ids are in files at `scratch`.
        """
        encoder, ranks, shape = self.encoder, self.ranks, (len(texts), self.encoder.spec.dim)
        part, done = path.with_suffix(".part"), path.with_suffix(".done")
        if ranks.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            if _allocate(part, 2 * shape[0] * shape[1]):
                done.unlink(missing_ok=True)  # its marks are of values that are gone
            _allocate(done, len(texts))
        ranks.wait()
        values = np.memmap(part, dtype=np.float16, mode="r+", shape=shape)
        marks = np.memmap(done, dtype=np.uint8, mode="r+", shape=shape[:1])
        if ranks.is_first:
            _copy_known(path, texts.keys, values, marks)
        ranks.wait()
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
            texts.keys.tofile(path.with_suffix(KEYS))
            os.replace(part, path)
        ranks.wait()
        return kept_in(path, *shape)


def fit_projection(reader: Reader, table: TokenTable, targets: Kept | Tensor) -> None:
    """Sets an encoder's projection to the linear map of its pooled vectors that comes closest to these targets.

    Dimensions that the targets do not have stay as they are.
    """
    encoder, ranks = reader.encoder, reader.ranks
    assert encoder.projection is not None
    projection, encoder.projection = encoder.projection, None
    some = np.linspace(0, len(table) - 1, min(len(table), FITTED_TEXTS)).astype(np.int64)
    width, dim = projection.in_features, targets.shape[1]
    products = torch.zeros(width, width + dim, dtype=torch.float64, device=ranks.device)
    for chunk in table.chunks(some, reader.tokens):
        pooled = nn.functional.normalize(reader.pooled(table, some[chunk]), dim=-1)
        both = torch.cat([pooled, take(targets, some[chunk], ranks.device)], dim=1)
        products += pooled.double().T @ both.double()
    own, shared = products[:, :width], products[:, width:]
    ridge = RIDGE * own.diagonal().mean() * torch.eye(width, dtype=torch.float64, device=ranks.device)
    with torch.no_grad():
        # Each rank computes all of it; equal weights matter more than the last digit.
        found = torch.linalg.solve(own + ridge, shared).T.to(projection.weight)
        projection.weight[:dim].copy_(ranks.sum(found if ranks.is_first else torch.zeros_like(found)))
    encoder.projection = projection


def read_once(
    name: str, texts: Texts, store: EncoderStore, scratch: Path, tokens: int = READ_TOKENS, precision: str = "bf16"
) -> Kept:
    """Reads the vectors of texts by an encoder as it is now, from disk if it has read them before.

    Those of two that are joined are written beside the vectors of each.
    """
    beside, alone = store.recipe.encoders[name].beside, _read_alone(name, texts, store, scratch, tokens, precision)
    if beside is None:
        return alone
    how = f"{_function(name, store, precision)} {_function(beside.encoder, store, precision)} {beside.share}"
    second = _read_alone(beside.encoder, texts, store, scratch, tokens, precision)
    path = file_of(store.vectors, how, texts)
    shape = len(texts), store.recipe.dim_of(name)
    with _locked(path, *shape, store.ranks) as known:
        if not known and store.ranks.is_first:
            _join((alone, second), beside.share, store, path)
    kept = kept_in(path, *shape)
    if store.ranks.is_first and not store.moments.is_file():
        _write_moments(kept, store)
    store.ranks.wait()
    return kept


def _join(parts: tuple[Kept, Kept], share: float, store: EncoderStore, path: Path) -> None:
    """Writes vectors side by side."""
    count, part, device = len(parts[0]), path.with_suffix(".part"), store.ranks.device
    with part.open("wb") as file:
        for start in range(0, count, FITTED_TEXTS):
            rows = np.arange(start, min(start + FITTED_TEXTS, count))
            first, second = (take(vectors, rows, device) for vectors in parts)
            both = torch.cat([math.sqrt(1 - share) * first, math.sqrt(share) * second], dim=1)
            file.write(both.half().cpu().numpy().tobytes())
    part.replace(path)


def _write_moments(kept: Kept, store: EncoderStore) -> None:
    """Writes the products of some side-by-side vectors, by the first texts that a run reads."""
    rows = np.linspace(0, len(kept) - 1, min(len(kept), FITTED_TEXTS)).astype(np.int64)
    some, new = take(kept, rows, store.ranks.device).double(), store.moments.with_suffix(".new.npy")
    new.parent.mkdir(parents=True, exist_ok=True)
    np.save(new, (some.T @ some).cpu().numpy())
    new.replace(store.moments)


def _read_alone(name: str, texts: Texts, store: EncoderStore, scratch: Path, tokens: int, precision: str) -> Kept:
    path, ranks = file_of(store.vectors, _function(name, store, precision), texts), store.ranks
    shape = len(texts), store.recipe.part_of(name)
    with _locked(path, *shape, ranks) as known:
        if known:
            return kept_in(path, *shape)
        reader = Reader(store.open(name, trained=False), ranks, tokens=tokens, precision=precision)
        return reader.keep(texts, path, scratch / path.stem)


@contextmanager
def _locked(path: Path, texts: int, dim: int, ranks: Ranks) -> Iterator[bool]:
    """Keeps other runs that share the file's folder from writing there, and tells whether the file is there already."""
    with ExitStack() as stack:
        if ranks.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"another run writes into {path.parent}: waiting for it", file=sys.stderr)
                fcntl.flock(folder, fcntl.LOCK_EX)
        ranks.wait()
        known = _is_whole(path, texts, dim)
        ranks.wait()  # all ranks have looked before one writes
        yield known
        ranks.wait()


def _function(name: str, store: EncoderStore, precision: str) -> str:
    """Names what decides about an encoder's vectors of a text; runs that share a folder may compute differently."""
    return f"{store.fingerprint(name)} {store.recipe.encoders[name].dtype} {precision}"


def file_of(folder: Path, function: str, texts: Texts) -> Path:
    """Returns where the vectors of these texts by this function are kept; files of one function begin alike."""
    name = hashlib.blake2b(f"{function} {texts.side}".encode(), digest_size=8)
    return folder / f"{name.hexdigest()}-{texts.digest}.f16"


def _copy_known(path: Path, keys: NDArray[np.uint64], values: Kept, marks: NDArray[np.uint8]) -> None:
    """Fills and marks the rows of `values` that other files of the same function hold."""
    for file in path.parent.glob(f"{path.name.partition('-')[0]}-*{KEYS}"):
        theirs, there = np.fromfile(file, dtype=np.uint64), file.with_suffix(path.suffix)
        if not len(theirs) or not _is_whole(there, len(theirs), values.shape[1]):
            continue
        vectors, order = kept_in(there, len(theirs), values.shape[1]), np.argsort(theirs)
        places = order[np.searchsorted(theirs, keys, sorter=order) % len(theirs)]
        rows = np.flatnonzero((theirs[places] == keys) & (marks == 0))
        for block in np.array_split(rows, len(rows) // FITTED_TEXTS + 1):
            values[block] = vectors[places[block]]
            marks[block] = 1


def _is_whole(path: Path, texts: int, dim: int) -> bool:
    return path.is_file() and path.stat().st_size == 2 * texts * dim


def kept_in(path: Path, texts: int, dim: int) -> Kept:
    """Returns the vectors of a finished file."""
    return np.memmap(path, dtype=np.float16, mode="r", shape=(texts, dim))


def _allocate(path: Path, size: int) -> bool:
    """Reserves a file of this size, unless it is there: a full disk shows here, not in the middle of a mapped write."""
    if path.is_file() and path.stat().st_size == size:
        return False
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    return True

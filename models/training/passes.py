"""Encodes token tables: with gradients in chunks (gradient caching), or once, cached on disk.

With gradients: a first pass computes vectors without a graph, the loss gives each vector its gradient, and a second
pass carries it into the weights. Readings that fit at once keep their graphs instead. Dropout is seeded by step,
reading and chunk, so that both passes see the same masks. Frozen encoders: a file is named by fingerprint and texts,
and chunks that were written are not read again.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from models.encoder.packed import joined
from models.encoder.packed.encoder import PackedModel
from models.encoder.packed.kernels import default_backend, lay_out
from models.encoder.packed.weights import read_weights
from models.encoder.spec import EncoderSpec
from models.encoder.tokenizer import AT_ONCE, FlatIds, Tokenizer, tokenise
from models.encoder.torch import TorchEncoder, finish
from models.errors import BadEncoder
from models.progress import Progress
from models.training.encoders import EncoderStore
from models.training.ranks import Ranks
from models.training.tables import Rows, Texts, map_file

Kept = NDArray[np.float16]
Padded = tuple[Tensor, Tensor]
"""Ids and attention mask, both (texts, longest)."""
PARTS = 8
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
READ_TOKENS = 32768
# Of the GPU's free memory, for one array: there are at most four, and a step needs most of the rest.
LARGEST_SHARE = 0.1
# Compiling takes half a minute on an H200: fewer tokens would not win it back.
COMPILED_TOKENS = 30_000_000
# Enough for a matrix of some thousand rows and columns.
FITTED_TEXTS = 65_536
RIDGE = 1e-3


class TokenTable:
    """Token ids of many texts, one after the other; a batch of them is moved to the training device."""

    def __init__(self, ids: FlatIds, starts: Rows, lengths: Rows, device: torch.device) -> None:
        self.ids, self.starts, self.lengths, self.device = ids, starts, lengths, device
        self._ids = on_device(ids, device)

    @classmethod
    def build(
        cls, texts: Texts, spec: EncoderSpec | None, tokenizer: Tokenizer, ranks: Ranks, path: Path | None = None
    ) -> TokenTable:
        """Tokenises all texts; with a path the first rank writes files, which all ranks map."""
        chunks = _tokenised(texts, spec, tokenizer, quiet=not ranks.is_first)
        if path is None:
            ids, starts, lengths = (np.concatenate(each) for each in zip(*chunks, strict=True))
            return cls(ids, starts, lengths, ranks.device)
        paths = [path.with_suffix(suffix) for suffix in (".ids", ".starts", ".lengths")]
        if ranks.is_first:
            with ExitStack() as stack:
                files = [stack.enter_context(each.open("wb")) for each in paths]
                for chunk in chunks:
                    for file, part in zip(files, chunk, strict=True):
                        file.write(np.asarray(part).tobytes())
        ranks.wait()
        ids, starts, lengths = (map_file(*each) for each in zip(paths, (np.int32, np.int64, np.int64), strict=True))
        return cls(ids, starts, lengths, ranks.device)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Rows) -> Padded:
        """Returns ids and mask (rows, longest), padded on the right with 0."""
        starts, lengths = (torch.from_numpy(part[rows]).to(self._ids.device) for part in (self.starts, self.lengths))
        columns = torch.arange(int(self.lengths[rows].max()), device=self._ids.device)
        mask = columns < lengths[:, None]
        places = (starts[:, None] + columns).clamp_(max=len(self.ids) - 1)
        ids = torch.where(mask, self._ids[places], 0)
        return ids.long().to(self.device), mask.long().to(self.device)

    def flat(self, rows: Rows) -> Tensor:
        """Returns the ids of these rows end to end, without padding."""
        lengths = self.lengths[rows]
        shifts = np.repeat(self.starts[rows] - (np.cumsum(lengths) - lengths), lengths)
        places = torch.from_numpy(shifts + np.arange(len(shifts))).to(self._ids.device)
        return self._ids[places].to(self.device)

    def chunks(self, rows: Rows, tokens: int) -> list[Rows]:
        """Returns positions in `rows`, texts of like lengths together, at most `tokens` padded tokens a chunk."""
        return chunks_of(self.lengths[rows], tokens)


def _tokenised(
    texts: Texts, spec: EncoderSpec | None, tokenizer: Tokenizer, *, quiet: bool
) -> Iterator[tuple[FlatIds, Rows, Rows]]:
    """Ids, their start in all ids, and the length of each text, a chunk of texts at a time."""
    # Few texts have more than eight characters a token: cutting first saves tokenising the rest of a long text.
    longest = 8 * tokenizer.max_length
    starts = range(0, len(texts), AT_ONCE)
    blocks = (texts.as_read_by(spec, range(start, min(start + AT_ONCE, len(texts)))) for start in starts)
    chunks = ([text[:longest] for text in block] for block in blocks)
    progress = Progress(f"tokenise {len(texts):,} texts ({texts.side})", "chunks", len(starts), quiet=quiet)
    before = 0
    for ids, sizes in progress.over(tokenise(chunks, len(texts), tokenizer)):
        lengths = sizes.astype(np.int64)
        yield ids, before + np.cumsum(lengths) - lengths, lengths
        before += len(ids)


def chunks_of(lengths: Rows, tokens: int) -> list[Rows]:
    """Positions, longest first, in groups whose padded size stays within the budget (or that are one text)."""
    order = np.argsort(-lengths, kind="stable")
    groups, first = [], 0
    while first < len(order):
        size = max(1, tokens // max(1, int(lengths[order[first]])))
        groups.append(order[first : first + size])
        first += size
    return groups


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Half precision on a GPU; a CPU computes in float32 whatever the recipe says."""
    enabled = device.type == "cuda" and precision in AUTOCAST
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision, torch.bfloat16), enabled=enabled)


@dataclass
class Reading:
    """Texts that one encoder reads in a step: rows of its token table."""

    encoder: TorchEncoder
    tokens: TokenTable
    rows: Rows
    leaf: Tensor = field(init=False)
    """Vectors (rows, native_dim) of all ranks, where the loss leaves its gradient."""
    kept: list[Tensor] = field(init=False, default_factory=list)
    """The chunks' vectors with their graphs, if all of them fit."""


class Passes:
    """The two passes of one step over its readings."""

    def __init__(self, readings: Sequence[Reading], ranks: Ranks, *, tokens: int, precision: str, seed: int) -> None:
        self._readings, self._ranks, self._precision, self._seed = readings, ranks, precision, seed
        shares = [ranks.share(len(reading.rows)) for reading in readings]
        lengths = [reading.tokens.lengths[reading.rows[own]] for reading, own in zip(readings, shares, strict=True)]
        # Readings that keep their graphs are cut by length too, for less padding.
        small = [chunks_of(of_reading, max(1, tokens // PARTS)) for of_reading in lengths]
        sizes = [_padded_size(*each) for each in zip(lengths, small, strict=True)]
        self._keeps, kept = graphs_kept(sizes, tokens)
        self._chunks: list[list[Rows]] = [
            [own[chunk] for chunk in (cut if keep else chunks_of(of_reading, tokens - kept))]
            for own, of_reading, cut, keep in zip(shares, lengths, small, self._keeps, strict=True)
        ]

    def forward(self) -> None:
        """Fills every reading's leaf."""
        for number, reading in enumerate(self._readings):
            leaf = torch.zeros(len(reading.rows), reading.encoder.spec.native_dim, device=self._ranks.device)
            with torch.set_grad_enabled(self._keeps[number]):
                for place, chunk in enumerate(self._chunks[number]):
                    vectors = self._encode(number, place)
                    leaf[torch.from_numpy(chunk).to(leaf.device)] = vectors.detach()
                    if self._keeps[number]:
                        reading.kept.append(vectors)
            reading.leaf = self._ranks.sum(leaf).requires_grad_(True)

    def backward(self) -> None:
        """Carries the leaves' gradients into the weights; those of several ranks are not yet added up."""
        for number, reading in enumerate(self._readings):
            if reading.leaf.grad is None:
                continue
            for place, chunk in enumerate(self._chunks[number]):
                vectors = reading.kept[place] if self._keeps[number] else self._encode(number, place)
                gradient = reading.leaf.grad[torch.from_numpy(chunk).to(vectors.device)]
                vectors.backward(gradient)  # type: ignore[no-untyped-call]
            reading.kept.clear()

    @property
    def padded_tokens(self) -> int:
        """What the chunks of this rank hold, padding included."""
        lengths = (reading.tokens.lengths[reading.rows] for reading in self._readings)
        return sum(_padded_size(*each) for each in zip(lengths, self._chunks, strict=True))

    def _encode(self, number: int, place: int) -> Tensor:
        reading, chunk = self._readings[number], self._chunks[number][place]
        sequence = np.random.SeedSequence([self._seed, self._ranks.rank, number, place])
        # torch.manual_seed keeps a stack trace of every call where no GPU is used: milliseconds, and memory for ever.
        seed = torch.default_generator if self._ranks.device.type == "cpu" else torch.random
        seed.manual_seed(int(sequence.generate_state(1)[0]))
        with autocast(self._ranks.device, self._precision):
            return reading.encoder.pooled(*reading.tokens.padded(reading.rows[chunk]), padded_right=True)


def _padded_size(lengths: Rows, chunks: list[Rows]) -> int:
    return sum(len(chunk) * int(lengths[chunk].max()) for chunk in chunks)


def graphs_kept(sizes: Sequence[int], tokens: int) -> tuple[list[bool], int]:
    """Decides which readings keep their graphs, and counts their tokens: all if they fit, else those within half.

    The other half is for the chunks of the others.
    """
    room = tokens if sum(sizes) <= tokens else tokens // 2
    keeps: list[bool] = []
    for size in sizes:
        keeps.append(size <= room)
        room -= size if keeps[-1] else 0
    return keeps, sum(size for size, keep in zip(sizes, keeps, strict=True) if keep)


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

    def keep(self, table: TokenTable, path: Path) -> Kept:
        """Returns the vectors of a whole table in a file (texts, dim), float16, mapped; read by all ranks together."""
        if self.ranks.device.type == "cuda":
            self.pack(table)
        chunks = table.chunks(np.arange(len(table)), self.tokens)
        shape = (len(table), self.encoder.spec.dim)
        part, done = path.with_suffix(".part"), path.with_suffix(".done")
        if self.ranks.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            _allocate(part, 2 * shape[0] * shape[1])
            _allocate(done, len(chunks))
        self.ranks.wait()
        values = np.memmap(part, dtype=np.float16, mode="r+", shape=shape)
        marks = np.memmap(done, dtype=np.uint8, mode="r+", shape=(len(chunks),))
        own = [place for place in self.ranks.share(len(chunks)) if not marks[place]]
        what, quiet = f"encode {len(table):,} texts once", not self.ranks.is_first
        for place in Progress(what, "chunks", len(own), quiet=quiet).over(own):
            values[chunks[place]] = self.vectors(table, chunks[place]).half().cpu().numpy()
            marks[place] = 1
        values.flush()
        self.ranks.wait()
        if self.ranks.is_first:
            os.replace(part, path)
            done.unlink()
        self.ranks.wait()
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
    how = f"{store.fingerprint(name)} {store.fingerprint(beside.encoder)} {beside.share}"
    path = file_of(store.vectors, how, texts)
    known = path.is_file()
    store.ranks.wait()  # all ranks have looked before the first one writes
    if not known:
        second = _read_alone(beside.encoder, texts, store, scratch, tokens, precision)
        if store.ranks.is_first:
            _join((alone, second), beside.share, store, path)
        store.ranks.wait()
    return kept_in(path, len(texts), store.recipe.dim)


def _join(parts: tuple[Kept, Kept], share: float, store: EncoderStore, path: Path) -> None:
    """Writes joined vectors; the run's matrix is fitted to the first texts that are joined."""
    count, part = len(parts[0]), path.with_suffix(".part")
    if not store.join.is_file():
        some = np.linspace(0, count - 1, min(count, FITTED_TEXTS)).astype(np.int64)
        matrix = joined.fit([np.asarray(vectors[some], dtype=np.float32) for vectors in parts], share, store.recipe.dim)
        store.join.parent.mkdir(parents=True, exist_ok=True)
        save_file({joined.WEIGHT: matrix}, store.join.with_suffix(".new"))
        store.join.with_suffix(".new").replace(store.join)
    matrix = load_file(store.join)[joined.WEIGHT]
    with part.open("wb") as file:
        for start in range(0, count, FITTED_TEXTS):
            block = [np.asarray(vectors[start : start + FITTED_TEXTS], dtype=np.float32) for vectors in parts]
            file.write(joined.join(block, share, matrix).astype(np.float16).tobytes())
    part.replace(path)


def _read_alone(name: str, texts: Texts, store: EncoderStore, scratch: Path, tokens: int, precision: str) -> Kept:
    path = file_of(store.vectors, store.fingerprint(name), texts)
    if path.is_file():
        return kept_in(path, len(texts), store.recipe.dim_of(name))
    encoder, ranks = store.open(name, trained=False), store.ranks
    table = TokenTable.build(texts, encoder.spec, encoder.tokenizer, ranks, scratch / path.stem)
    return Reader(encoder, ranks, tokens=tokens, precision=precision).keep(table, path)


def file_of(folder: Path, fingerprint: str, texts: Texts) -> Path:
    """Returns where the vectors of these texts by this encoder are kept."""
    digest = hashlib.blake2b(f"{fingerprint} {texts.side}".encode(), digest_size=12)
    for row, text in enumerate(texts.texts):
        given = texts.instructions[row] if texts.instructions is not None else None
        # Lengths keep two lists apart whose texts join to the same bytes.
        content = repr((given, text)).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return folder / f"{digest.hexdigest()}.f16"


def kept_in(path: Path, texts: int, dim: int) -> Kept:
    """Returns the vectors of a finished file."""
    return np.memmap(path, dtype=np.float16, mode="r", shape=(texts, dim))


def on_device(values: Kept | FlatIds, device: torch.device) -> Tensor:
    """Returns the array on the device if that has the room, else where it is: a step gathers its rows there."""
    # A mapped file stays one: pages are read when they are asked for. Nothing writes to it.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        tensor = torch.from_numpy(values)
    fits = device.type == "cuda" and values.nbytes < torch.cuda.mem_get_info(device)[0] * LARGEST_SHARE
    return tensor.to(device) if fits else tensor


def take(kept: Kept | Tensor, rows: Rows, device: torch.device) -> Tensor:
    """Returns rows of kept vectors in float32 on the device."""
    if not isinstance(kept, Tensor):
        return torch.from_numpy(np.asarray(kept[rows])).to(device).float()
    return kept[torch.from_numpy(rows).to(kept.device)].to(device).float()


def _allocate(path: Path, size: int) -> None:
    """Reserves a file of this size: a full disk shows here, not in the middle of a mapped write."""
    if path.is_file() and path.stat().st_size == size:
        return
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)

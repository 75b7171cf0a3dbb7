"""Token tables, and what reads them with gradients, in chunks (gradient caching).

A first pass computes vectors without a graph, the loss gives each vector its gradient, and a second pass carries it
into the weights. Readings that fit at once keep their graphs instead. Dropout is seeded by step, reading and chunk, so
that both passes see the same masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.encoder.packed.kernels import lay_out, send
from models.encoder.spec import EncoderSpec
from models.encoder.tokenizer import AT_ONCE, FlatIds, Tokenizer, tokenise
from models.encoder.torch import TorchEncoder
from models.progress import Progress
from models.training.kept import Kept
from models.training.packed import can_pack, read_packed
from models.training.ranks import Ranks
from models.training.texts import Rows, Texts, map_file

Padded = tuple[Tensor, Tensor]
"""Ids and attention mask, both (texts, longest)."""
PARTS = 8
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
AMPERE = (8, 0)
# Of the GPU's free memory, for one array: there are at most four, and a step needs most of the rest.
LARGEST_SHARE = 0.1


class TokenTable:
    """Token ids of many texts, one after the other; a batch of them is moved to the training device."""

    def __init__(self, ids: FlatIds, starts: Rows, lengths: Rows, device: torch.device) -> None:
        self.ids, self.starts, self.lengths, self.device = ids, starts, lengths, device
        # A mapped file stays one: pages are read when they are asked for. Nothing writes to it.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            tensor = torch.from_numpy(ids)
        self._ids = tensor.to(device) if has_room(device, ids.nbytes) else tensor

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
        starts, lengths = (send(part[rows], self._ids.device) for part in (self.starts, self.lengths))
        columns = torch.arange(int(self.lengths[rows].max()), device=self._ids.device)
        mask = columns < lengths[:, None]
        places = (starts[:, None] + columns).clamp_(max=len(self.ids) - 1)
        ids = torch.where(mask, self._ids[places], 0)
        return ids.long().to(self.device), mask.long().to(self.device)

    def flat(self, rows: Rows) -> Tensor:
        """Returns the ids of these rows end to end, without padding."""
        lengths = self.lengths[rows]
        shifts = np.repeat(self.starts[rows] - (np.cumsum(lengths) - lengths), lengths)
        places = send(shifts + np.arange(len(shifts)), self._ids.device)
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
    blocks = (texts.as_read_by(spec, slice(start, start + AT_ONCE)) for start in starts)
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


def packs(encoder: TorchEncoder, device: torch.device, precision: str) -> bool:
    """Returns whether texts are read end to end: flash attention is in half precision, on GPUs from Ampere on."""
    if device.type != "cuda" or precision not in AUTOCAST:
        return False
    return torch.cuda.get_device_capability(device) >= AMPERE and can_pack(encoder)


@dataclass
class Reading:
    """Texts that one encoder reads in a step: rows of its token table, end to end or padded."""

    encoder: TorchEncoder
    tokens: TokenTable
    rows: Rows
    packed: bool = False
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
        # Padded readings that keep their graphs are cut by length too, for less padding.
        small = [
            _cut(of_reading, tokens if reading.packed else max(1, tokens // PARTS), packed=reading.packed)
            for reading, of_reading in zip(readings, lengths, strict=True)
        ]
        self._keeps, kept = graphs_kept([sum(size for _, size in cut) for cut in small], tokens)
        cuts = [
            cut if keep else _cut(of_reading, tokens - kept, packed=reading.packed)
            for reading, of_reading, cut, keep in zip(readings, lengths, small, self._keeps, strict=True)
        ]
        self._chunks = [[own[chunk] for chunk, _ in cut] for own, cut in zip(shares, cuts, strict=True)]
        self.tokens = sum(size for cut in cuts for _, size in cut)
        """What the chunks of this rank hold, padding included."""

    def forward(self) -> None:
        """Fills every reading's leaf."""
        for number, reading in enumerate(self._readings):
            leaf = torch.zeros(len(reading.rows), reading.encoder.spec.native_dim, device=self._ranks.device)
            with torch.set_grad_enabled(self._keeps[number]):
                for place, chunk in enumerate(self._chunks[number]):
                    vectors = self._encode(number, place)
                    leaf[send(chunk, leaf.device)] = vectors.detach()
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
                gradient = reading.leaf.grad[send(chunk, vectors.device)]
                vectors.backward(gradient)  # type: ignore[no-untyped-call]
            reading.kept.clear()

    def _encode(self, number: int, place: int) -> Tensor:
        reading, chunk = self._readings[number], self._chunks[number][place]
        sequence = np.random.SeedSequence([self._seed, self._ranks.rank, number, place])
        # torch.manual_seed keeps a stack trace of every call where no GPU is used: milliseconds, and memory for ever.
        seed = torch.default_generator if self._ranks.device.type == "cpu" else torch.random
        seed.manual_seed(int(sequence.generate_state(1)[0]))
        rows, table = reading.rows[chunk], reading.tokens
        with autocast(self._ranks.device, self._precision):
            if reading.packed:
                return read_packed(reading.encoder, lay_out(table.flat(rows), table.lengths[rows]))
            return reading.encoder.pooled(*table.padded(rows), padded_right=True)


def _cut(lengths: Rows, tokens: int, *, packed: bool) -> list[tuple[Rows, int]]:
    """Returns chunks of at most `tokens` tokens (or one text), and the number in each, padding included."""
    if not packed:
        return [(chunk, len(chunk) * int(lengths[chunk].max())) for chunk in chunks_of(lengths, tokens)]
    ends, chunks, first = np.cumsum(lengths), list[tuple[Rows, int]](), 0
    while first < len(lengths):
        before = int(ends[first] - lengths[first])
        last = max(first + 1, int(np.searchsorted(ends, before + tokens, side="right")))
        chunks.append((np.arange(first, last), int(ends[last - 1]) - before))
        first = last
    return chunks


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


def has_room(device: torch.device, size: int) -> bool:
    """Returns whether an array of `size` bytes goes to the device; if not, each step gathers its rows."""
    return device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] * LARGEST_SHARE


def on_device(kept: Kept, device: torch.device) -> Kept | Tensor:
    """Returns vectors on the device if that has the room, else as they are."""
    if not has_room(device, kept.nbytes):
        return kept
    found = torch.empty(kept.shape, dtype=torch.float16, device=device)
    for start in range(0, len(kept), AT_ONCE):
        found[start : start + AT_ONCE] = torch.from_numpy(kept[start : start + AT_ONCE])
    return found


def take(kept: Kept | Tensor, rows: Rows, device: torch.device) -> Tensor:
    """Returns rows of kept vectors in float32 on the device."""
    if isinstance(kept, Kept):
        return send(kept[rows], device).float()
    return kept[send(rows, kept.device)].to(device).float()

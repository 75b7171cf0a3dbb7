"""Encodes texts for the indexer with torch, without padding: PackedEncoder, and its forward pass PackedModel.

While the device runs one batch, the next is tokenised and sent, and the vectors of the one before are copied back.
After running out of memory, batches have half as many tokens. The residual stream is in the numbers of the weights.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.encoder.packed.attention import Attend, Backend, Scope, default_backend, padded
from models.encoder.packed.kernels import SHORT_TOKENS, Activation, Linear, Norm, Packed, Pieces, activation, norm, pack
from models.encoder.packed.weights import COMPUTATION, Layer, Norms, Weights, read_weights
from models.encoder.spec import EncoderSpec, Pooling, Precision, Side
from models.encoder.tokenizer import Tokenizer, Tokens
from models.encoder.torch import TorchEncoder, Vectors, weight_files
from models.errors import BadEncoder, OutOfDeviceMemory

# Enough rows for the matrix kernels to run at their full speed; activations of an 8B take about 5 GB.
GPU_TOKENS = 32_768
CPU_TOKENS = 4_096
# Batches under way: one that runs, one that waits behind it.
IN_FLIGHT = 2
# Enough that the end of a call, where the device runs dry, does not count: of a 4B, half a minute on a large GPU.
GPU_TEXTS = 8_192
CPU_TEXTS = 256

# Ada; Hopper has 9.0.
FP8_CAPABILITY = (8, 9)

Forward = Callable[[Packed], Tensor]


@dataclass(frozen=True, slots=True)
class _Sent:
    """Vectors on their way back, and the rows that they belong to."""

    rows: list[int]
    vectors: Tensor
    done: torch.cuda.Event | None


class PackedEncoder:
    """What the indexer asks of an encoder (`indexer.encode.Encoder`); not for several threads at once."""

    def __init__(
        self, spec: EncoderSpec, precision: Precision, tokenizer: Tokenizer, weights: Sequence[str],
        forward: Forward, device: torch.device, token_budget: int | None = None,
    ) -> None:  # fmt: skip
        on_gpu = device.type == "cuda"
        self.spec = spec
        self.variant = precision
        self.fingerprint = spec.fingerprint(*weights, computed=f"{precision} {COMPUTATION}")
        self.tokenizer = tokenizer
        self.bulk_texts = GPU_TEXTS if on_gpu else CPU_TEXTS
        self.token_budget = token_budget or (GPU_TOKENS if on_gpu else CPU_TOKENS)
        self._forward = forward
        self._device = device

    @classmethod
    def load(
        cls, folder: Path, spec: EncoderSpec | None = None, *, device: str | None = None,
        precision: Precision | None = None, token_budget: int | None = None, threads: int = 0,
    ) -> PackedEncoder:  # fmt: skip
        """Opens and verifies an encoder folder; on the GPU in bf16 if there is one, else here in fp32.

        `spec` replaces the folder's own.
        """
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type == "cuda" and not torch.cuda.is_available():
            raise BadEncoder(f"--device {device}: torch sees no GPU here")
        if threads:
            torch.set_num_threads(threads)
        chosen = precision or (Precision.BF16 if place.type == "cuda" else Precision.FP32)
        if chosen is Precision.FP8 and place.type == "cuda":
            require_fp8(torch.cuda.get_device_name(place), torch.cuda.get_device_capability(place))
        encoder = TorchEncoder.load(folder, spec, dtype=torch.float32 if chosen is Precision.FP32 else torch.bfloat16)
        # Flash attention has no kernel for fp32.
        backend = default_backend(place) if chosen is not Precision.FP32 else padded
        try:
            weights = read_weights(encoder.backbone, encoder.spec.max_length, place, fp8=chosen is Precision.FP8)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"{place} lacks the memory for the weights of {folder} in {chosen}; free it or use a larger one, "
                "--precision fp8 or a smaller encoder"
            ) from error
        # Compiling pays if memory is the limit between the products: on a GPU.
        model = PackedModel(weights, backend, encoder.spec.pooling, compiled=place.type == "cuda")
        forward = model if encoder.projection is None else _projected(model, encoder.projection.to(place).float())
        return cls(encoder.spec, chosen, encoder.tokenizer, weight_files(folder), forward, place, token_budget)

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Returns unit vectors (texts, dim) in the order given."""
        instruction = self.spec.instruction(side)
        items = tokenised([instruction + text for text in texts], self.tokenizer)
        vectors = np.empty((len(texts), self.spec.dim), dtype=np.float32)
        under_way: deque[_Sent] = deque()
        for batch in batches(items, lambda: self.token_budget):
            under_way.extend(self._send_all(batch))
            while len(under_way) > IN_FLIGHT:
                _receive(under_way.popleft(), vectors)
        while under_way:
            _receive(under_way.popleft(), vectors)
        return vectors

    def _send_all(self, batch: list[Item]) -> list[_Sent]:
        """Starts the batch, in as many parts as the device's memory asks for."""
        sent, waiting = [], deque([batch])
        while waiting:
            part = waiting.popleft()
            try:
                sent.append(self._send(part))
                continue
            except torch.OutOfMemoryError:
                pass  # the exception frees the failed attempt's memory before the next one
            if len(part) == 1:
                raise OutOfDeviceMemory(
                    f"{self._device} lacks the memory for one text of {len(part[0].tokens)} tokens; "
                    "use a larger GPU, --precision fp8 or a smaller encoder"
                )
            self._halve(sum(len(item.tokens) for item in part))
            waiting.extendleft((part[len(part) // 2 :], part[: len(part) // 2]))
        return sent

    def _halve(self, tokens: int) -> None:
        self.token_budget = max(tokens // 2, 1)
        print(f"out of memory with {tokens} tokens at a time: going on with {self.token_budget}", file=sys.stderr)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _send(self, batch: list[Item]) -> _Sent:
        hidden = self._forward(pack([item.tokens for item in batch], self._device))
        # Cut first, then normed.
        vectors = hidden.float()[:, : self.spec.dim]
        if self.spec.normalize:
            vectors = functional.normalize(vectors, dim=-1)
        rows = [item.row for item in batch]
        if self._device.type != "cuda":
            return _Sent(rows, vectors, None)
        here = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True).copy_(vectors, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _Sent(rows, here, done)


def _projected(model: PackedModel, projection: torch.nn.Module) -> Forward:
    return lambda batch: cast(Tensor, projection(model(batch).float()))


def require_fp8(gpu: str, capability: tuple[int, int]) -> None:
    """Refuses a GPU without fp8 before its weights are loaded."""
    if capability < FP8_CAPABILITY:
        needed, own = (".".join(map(str, version)) for version in (FP8_CAPABILITY, capability))
        raise BadEncoder(f"--precision fp8: {gpu} has compute capability {own}, fp8 needs {needed}; use bf16")


def _receive(sent: _Sent, vectors: Vectors) -> None:
    if sent.done is not None:
        sent.done.synchronize()
    vectors[sent.rows] = sent.vectors.numpy()


# One call of the tokenizer, which spreads it over the cores and holds no lock meanwhile; two calls ahead keep a device
# busy that needs longer for their tokens than they take.
CHUNK_TEXTS = 512
AHEAD = 2


@dataclass(frozen=True, slots=True)
class Item:
    """A text's tokens, and where its vector belongs."""

    row: int
    tokens: Tokens


def tokenised(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[Item]:
    """Yields every text, longest first (by characters), while later ones are being tokenised."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
    chunks = [order[start : start + CHUNK_TEXTS] for start in range(0, len(order), CHUNK_TEXTS)]
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        ahead: deque[tuple[list[int], Future[list[Tokens]]]] = deque()
        for rows in chunks:
            ahead.append((rows, pool.submit(tokenizer.batch, [texts[row] for row in rows])))
            if len(ahead) > AHEAD:
                yield from _items(*ahead.popleft())
        while ahead:
            yield from _items(*ahead.popleft())


def _items(rows: list[int], future: Future[list[Tokens]]) -> Iterator[Item]:
    for row, tokens in zip(rows, future.result(), strict=True):
        yield Item(row, tokens)


def batches(items: Iterable[Item], budget: Callable[[], int]) -> Iterator[list[Item]]:
    """Items in their order, in lists within a token budget; one that is longer comes alone.

    Short texts have batches of their own, so that fp8 vectors do not depend on the other texts (`Packed.short`). The
    budget is read each time: it may have shrunk.
    """
    waiting: dict[bool, list[Item]] = {False: [], True: []}
    sizes = {False: 0, True: 0}
    for item in items:
        short = len(item.tokens) <= SHORT_TOKENS
        if waiting[short] and sizes[short] + len(item.tokens) > budget():
            yield waiting[short]
            waiting[short], sizes[short] = [], 0
        waiting[short].append(item)
        sizes[short] += len(item.tokens)
    yield from filter(None, waiting.values())


class PackedModel:
    """The forward pass with pooling."""

    def __init__(
        self, weights: Weights, attention: Backend, pooling: Pooling = Pooling.EOS, *, compiled: bool = False
    ) -> None:
        self._weights = weights
        self._pooling = pooling
        self._attention = attention
        self._pieces = Pieces(activation(weights.activation, gated=weights.gated), compiled=compiled)

    @torch.no_grad()
    def __call__(self, batch: Packed) -> Tensor:
        """The pooled last hidden states (documents, hidden)."""
        weights = self._weights
        hidden = self._embed(batch)
        attends: dict[Scope, Attend] = {}
        *layers, final = weights.careful if batch.short else weights.layers
        for layer in (*layers, final):
            if layer.scope not in attends:
                attends[layer.scope] = self._attention(batch, layer.scope)
        for layer in layers:
            hidden = self._run(layer, hidden, batch, attends[layer.scope], None)
        # CLS and EOS read one token a document: the others give the last layer keys and values, no more.
        rows = pooled_rows(batch, self._pooling)
        hidden = self._run(final, hidden, batch, attends[final.scope], rows)
        hidden = hidden if weights.norm is None else norm(hidden, *weights.norm)
        return hidden if rows is not None else mean(hidden, batch)

    def _embed(self, batch: Packed) -> Tensor:
        table = self._weights.embedding
        hidden = functional.embedding(batch.ids, table.tokens)
        if table.scale != 1.0:
            hidden = hidden * table.scale
        if table.positions is not None:
            hidden = hidden + table.positions[batch.positions]
        if table.types is not None:
            hidden = hidden + table.types
        return hidden if table.norm is None else norm(hidden, *table.norm)

    def _run(self, layer: Layer, hidden: Tensor, batch: Packed, attend: Attend, rows: Tensor | None) -> Tensor:
        """Returns the residual stream after the layer, in place; only its `rows`, and a copy, if they are given."""
        pieces, weights = self._pieces, self._weights
        joint = layer.qkv(self._normed(hidden, layer.attention.before, layer.qkv))
        queries, keys, values = weights.heads.split(joint)
        if layer.rotation is not None:
            turns = (*layer.rotation, layer.head_norms, layer.biases, weights.eps, weights.heads)
            queries, keys = pieces.rotate(joint, batch.positions, *turns)
        mixed = attend(queries, keys, values).flatten(1)
        if rows is not None:
            mixed, hidden = mixed[rows], hidden[rows]
        mixed = pieces.carry[layer.out.quantised](mixed)
        if weights.parallel:
            joint = layer.up(self._normed(hidden, layer.mlp.before, layer.up))
            hidden = self._add(layer.out, mixed, hidden, layer.attention)
        else:
            hidden = self._add(layer.out, mixed, hidden, layer.attention)
            joint = layer.up(self._normed(hidden, layer.mlp.before, layer.up))
        return self._add(layer.down, pieces.activate[layer.down.quantised](joint), hidden, layer.mlp)

    def _normed(self, hidden: Tensor, before: Norm | None, matrix: Linear) -> Activation:
        pieces = self._pieces
        found: Activation = (
            pieces.carry[matrix.quantised](hidden) if before is None else pieces.norm[matrix.quantised](hidden, *before)
        )
        return found

    def _add(self, matrix: Linear, inputs: Activation, hidden: Tensor, norms: Norms) -> Tensor:
        if norms.branch is None:
            matrix.add_to(hidden, inputs)
        else:
            hidden += self._pieces.norm[False](matrix(inputs), *norms.branch)
        return hidden if norms.after is None else self._pieces.norm[False](hidden, *norms.after)


def pooled_rows(batch: Packed, pooling: Pooling) -> Tensor | None:
    """Returns the row of each document whose hidden state is its embedding; None if that is the mean of all rows."""
    return {Pooling.EOS: batch.last, Pooling.CLS: batch.boundaries[: len(batch.last)]}.get(pooling)


def mean(hidden: Tensor, batch: Packed) -> Tensor:
    """Returns the mean hidden state of each document in float32; a running sum would lose digits over a long batch."""
    documents = len(batch.last)
    lengths = batch.boundaries.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    total = hidden.new_zeros((len(lengths), hidden.shape[1]), dtype=torch.float32)
    total.index_add_(0, owner, hidden.float())
    return total[:documents] / lengths[:documents, None]

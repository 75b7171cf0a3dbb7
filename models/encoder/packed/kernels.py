"""Operations on packed batches: layout, linear layers, and what torch.compile fuses between them.

Matrix products stay outside of torch.compile: the vendor's kernels are faster and add to the residual in place. Norms
and rotations are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.encoder.tokenizer import Tokens, flatten

# Matrix kernels are written for whole tiles; at most 63 tokens of a batch are filler.
TILE = 64
# More than twice the tokens of the longest text that fp8 was seen to tip over (docs/adr/0008).
SHORT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch on its device. The filler at its end, if any, is one more document, which `last` leaves out."""

    ids: Tensor
    """(tokens,) int32"""
    positions: Tensor
    """(tokens,) int64: each token's place in its document"""
    boundaries: Tensor
    """(documents + 1,) int32: where documents begin, and the end"""
    last: Tensor
    """(documents,) int64: the row of each document's last token"""
    longest: int
    """tokens of the longest document"""
    short: bool
    """whether a document has at most SHORT_TOKENS tokens"""


def pack(batch: Sequence[Tokens], device: torch.device) -> Packed:
    """Lays the documents out and sends them to the device, without waiting for it."""
    ids, lengths = flatten(batch)
    return lay_out(send(ids, device), lengths)


def lay_out(ids: Tensor, lengths: NDArray[np.integer]) -> Packed:
    """Returns a batch of documents whose tokens already lie end to end on their device."""
    device, tokens = ids.device, len(ids)
    last = np.cumsum(lengths, dtype=np.int64) - 1
    short = bool(lengths.min() <= SHORT_TOKENS)
    filler = -tokens % TILE
    if filler:
        ids = functional.pad(ids, (0, filler))
        lengths = np.append(lengths, filler)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(len(ids)) - np.repeat(boundaries[:-1], lengths)
    ends = send(boundaries.astype(np.int32), device)
    return Packed(ids, send(positions, device), ends, send(last, device), int(lengths.max()), short)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns an array on the device; a GPU gets it when it comes to it, and nothing waits."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

Quantised = tuple[Tensor, Tensor]
"""(rows, columns) in fp8, and the scale of each row, (rows, 1) float32"""
Activation = Tensor | Quantised


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix (outputs, inputs) in the encoder's own numbers."""

    weight: Tensor
    bias: Tensor | None = None
    quantised = False

    def __call__(self, inputs: Activation) -> Tensor:
        assert isinstance(inputs, Tensor)
        return functional.linear(inputs, self.weight, self.bias)

    def add_to(self, residual: Tensor, inputs: Activation) -> None:
        """Adds the product in place: the matrix kernel does it on its way out, with no pass over memory of its own."""
        assert isinstance(inputs, Tensor)
        residual.addmm_(inputs, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix (outputs, inputs) in fp8 and the scale of each output, (1, outputs); products are in `dtype`."""

    weight: Tensor
    scale: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    quantised = True

    @classmethod
    def of(cls, dense: Dense) -> Scaled:
        weight, scale = quantise(dense.weight)
        return cls(weight, scale.t().contiguous(), dense.weight.dtype, dense.bias)

    def __call__(self, inputs: Activation) -> Tensor:
        values, scale = inputs
        if values.is_cuda:
            product = torch._scaled_mm(
                values, self.weight.t(), scale, self.scale, out_dtype=self.dtype, use_fast_accum=True
            )
        else:  # no such kernel: the same numbers, multiplied in float32
            product = ((values.float() @ self.weight.float().t()) * scale * self.scale).to(self.dtype)
        return product if self.bias is None else product.add_(self.bias)

    def add_to(self, residual: Tensor, inputs: Activation) -> None:
        residual.add_(self(inputs))


Linear = Dense | Scaled


def quantise(values: Tensor) -> Quantised:
    """Returns rows in fp8, each scaled so that its largest value is the largest of fp8."""
    wide = values.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_new": partial(functional.gelu, approximate="tanh"),
}


class Heads(NamedTuple):
    """How the columns of the joint query, key and value matrix are read."""

    queries: int
    keys: int
    width: int

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (tokens, heads, width): views."""
        parts = joint.view(len(joint), -1, self.width)
        first, second = self.queries, self.queries + self.keys
        return parts[:, :first], parts[:, first:second], parts[:, second:]


class Norm(NamedTuple):
    """RMS norm, or layer norm if `centred`, over the last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


def norm(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    wide = hidden.float()
    if centred:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    return (wide if bias is None else wide + bias.float()).to(hidden.dtype)


class Biases(NamedTuple):
    """Biases of queries and keys (heads, width), and the mean rotated key bias, subtracted from all keys, in float32.

    Qwen2's key biases reach 145 where the rest of a key is about 1: a sum in bf16, which has steps of 1 there, leaves
    little of it. Attention weighs keys by their differences, so it does not see what all keys share, and large biases
    are nearly that: they lie where the rotation is slow.
    """

    queries: Tensor
    keys: Tensor
    shared: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Biases:
        queries, keys = queries.to(torch.float32, copy=True), keys.to(torch.float32, copy=True)
        one, two = keys.chunk(2, dim=-1)
        return cls(queries, keys, torch.cat(_turned(one, two, cos.mean(dim=0), sin.mean(dim=0)), dim=-1))


def rotate(
    joint: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None,
    biases: Biases | None, eps: float, heads: Heads,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys (tokens, heads, width): normed if the layer has head norms, with biases, then rotated.

    `cos` and `sin` are (positions, rotated width / 2).
    """
    queries, keys, _ = heads.split(joint)
    turn = (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), eps)
    query_norm, key_norm = norms or (None, None)
    query_bias, key_bias, shared = biases or (None, None, None)
    return _turn(queries, *turn, query_norm, query_bias), _turn(keys, *turn, key_norm, key_bias, shared)


def _turn(
    part: Tensor, cos: Tensor, sin: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None,
    shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    # By halves, so that the sum of squares and the rotation read each value once, in one kernel.
    half = cos.shape[-1]
    one, two, rest = part[..., :half].float(), part[..., half : 2 * half].float(), part[..., 2 * half :]
    if weight is not None:
        squares = (one.square() + two.square()).sum(dim=-1, keepdim=True)
        scale = torch.rsqrt(squares / part.shape[-1] + eps)
        one, two = one * scale * weight[:half].float(), two * scale * weight[half:].float()
    if bias is not None:
        one, two = one + bias[..., :half], two + bias[..., half:]
    one, two = _turned(one, two, cos, sin)
    if shared is not None:
        one, two = one - shared[..., :half], two - shared[..., half:]
    return torch.cat((one.to(part.dtype), two.to(part.dtype), rest), dim=-1)


def _turned(one: Tensor, two: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return one * cos - two * sin, two * cos + one * sin


def activation(name: str, *, gated: bool) -> Callable[[Tensor], Tensor]:
    """Returns the function of (tokens, columns); gated: of gate and up columns side by side, to half as many."""
    act = ACTIVATIONS[name]

    def plain(joint: Tensor) -> Tensor:
        return act(joint.float()).to(joint.dtype)

    def gate(joint: Tensor) -> Tensor:
        gates, ups = joint.chunk(2, dim=-1)
        return (act(gates.float()) * ups.float()).to(joint.dtype)

    return gate if gated else plain


class Pieces:
    """The functions, compiled or as they stand; norm, activate and carry by whether fp8 comes out of them."""

    def __init__(self, activate: Callable[[Tensor], Tensor], *, compiled: bool) -> None:
        fuse = partial(_fuse, compiled=compiled)
        self.rotate = fuse(rotate, rows=2)
        self.norm = {False: fuse(norm), True: fuse(_quantised(norm))}
        self.activate = {False: fuse(activate), True: fuse(_quantised(activate))}
        self.carry: dict[bool, Callable[..., Any]] = {False: lambda values: values, True: fuse(quantise)}


def _quantised(function: Callable[..., Tensor]) -> Callable[..., Quantised]:
    return lambda *arguments: quantise(function(*arguments))


def _fuse(function: Callable[..., Any], rows: int = 1, *, compiled: bool) -> Callable[..., Any]:
    """Returns the function compiled for any number of tokens, the first dimension of its first `rows` arguments."""
    if not compiled:
        return function
    kernel = torch.compile(function, fullgraph=True, mode="max-autotune-no-cudagraphs")

    def call(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
        for tensor in arguments[:rows]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return kernel(*arguments)

    return call

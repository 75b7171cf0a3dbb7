"""What lies between a layer's matrix products, each a function that torch.compile turns into one kernel.

The products themselves stay outside: the vendor's matrix kernels are the quickest there are, and add to the residual
stream in place. Statistics and rotations are computed in float32, whatever the numbers of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.packed.linear import Quantised, quantise


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


def norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * weight.float()).to(hidden.dtype)


class Biases(NamedTuple):
    """Qwen2's biases of queries and keys (heads, width), and what every key is the less by, all float32.

    Key biases reach 145 where the rest of a key is about 1: a sum in bf16, which has steps of 1 there, leaves little of
    it. Attention weighs keys by their differences, so it does not see what all keys share, and large biases are nearly
    that: they lie where a turn is slow. So they are added in float32, and their mean over all positions taken off.
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
    """Queries and keys (tokens, heads, width): normed where Qwen3 does, with Qwen2's biases, then turned.

    `cos` and `sin` are (positions, width / 2).
    """
    queries, keys, _ = heads.split(joint)
    turn = (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), eps)
    query_norm, key_norm = norms or (None, None)
    query_bias, key_bias, shared = biases or (None, None, None)
    return _turn(queries, *turn, query_norm, query_bias), _turn(keys, *turn, key_norm, key_bias, shared)


def _turn(
    part: Tensor, cos: Tensor, sin: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None,
    less: Tensor | None = None,
) -> Tensor:  # fmt: skip
    # By halves, so that the sum of squares and the turn read each value once, in one kernel.
    half = part.shape[-1] // 2
    one, two = part[..., :half].float(), part[..., half:].float()
    if weight is not None:
        squares = (one.square() + two.square()).sum(dim=-1, keepdim=True)
        scale = torch.rsqrt(squares / part.shape[-1] + eps)
        one, two = one * scale * weight[:half].float(), two * scale * weight[half:].float()
    if bias is not None:
        one, two = one + bias[..., :half], two + bias[..., half:]
    one, two = _turned(one, two, cos, sin)
    if less is not None:
        one, two = one - less[..., :half], two - less[..., half:]
    return torch.cat((one, two), dim=-1).to(part.dtype)


def _turned(one: Tensor, two: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return one * cos - two * sin, two * cos + one * sin


def gate(joint: Tensor) -> Tensor:
    """SwiGLU of gate and up columns side by side: (tokens, 2 · width) to (tokens, width)."""
    gates, ups = joint.chunk(2, dim=-1)
    return (functional.silu(gates.float()) * ups.float()).to(joint.dtype)


def norm_fp8(hidden: Tensor, weight: Tensor, eps: float) -> Quantised:
    return quantise(norm(hidden, weight, eps))


def gate_fp8(joint: Tensor) -> Quantised:
    return quantise(gate(joint))


class Pieces:
    """The functions, compiled or as they stand; norm, gate and carry by whether fp8 comes out of them."""

    def __init__(self, *, compiled: bool) -> None:
        fuse = partial(_fuse, compiled=compiled)
        self.rotate = fuse(rotate, rows=2)
        self.norm = {False: fuse(norm), True: fuse(norm_fp8)}
        self.gate = {False: fuse(gate), True: fuse(gate_fp8)}
        self.carry: dict[bool, Callable[..., Any]] = {False: lambda values: values, True: fuse(quantise)}


def _fuse(function: Callable[..., Any], rows: int = 1, *, compiled: bool) -> Callable[..., Any]:
    """The function compiled for any number of tokens, the first dimension of its first `rows` arguments."""
    if not compiled:
        return function
    kernel = torch.compile(function, fullgraph=True, mode="max-autotune-no-cudagraphs")

    def call(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
        for tensor in arguments[:rows]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return kernel(*arguments)

    return call

"""Model shapes to measure, the cost of their forward pass, and the speed of the device itself."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from models.encoder.folder import CONFIG_FILE, read_config, read_tokenizer
from models.encoder.packed.kernels import Dense, Scaled, quantise
from models.encoder.spec import TOKENIZER_FILE, Pooling
from models.rows import read_lines
from models.training.shapes import SHAPES as PUBLISHED
from models.training.shapes import made

MAX_LENGTH = 512
DIM = 768
SEED = 7


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder by the sizes in its config.json; `paper_hours` is what the paper took for a million documents."""

    name: str
    sizes: dict[str, Any]
    paper_hours: float | None = None

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's four products."""
        hidden, inner, width = (self.sizes[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
        heads, key_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        return {
            "qkv": ((heads + 2 * key_heads) * width, hidden),
            "out": (hidden, heads * width),
            "up": (2 * inner, hidden),
            "down": (hidden, inner),
        }

    def flops(self, lengths: Sequence[int]) -> float:
        """Operations that are computed on real tokens.

        Of the last layer all but queries, keys and values is computed for the last tokens only; attention is counted
        for the pairs that causality leaves.
        """
        tokens, documents = sum(lengths), len(lengths)
        sizes = {name: rows * columns for name, (rows, columns) in self.matrices().items()}
        layer = sum(sizes.values())
        last = sizes["qkv"] * tokens + (layer - sizes["qkv"]) * documents
        layers: int = self.sizes["num_hidden_layers"]
        products = 2.0 * ((layers - 1) * layer * tokens + last)
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return products + 4.0 * layers * self.matrices()["out"][1] * pairs

    def config(self) -> PretrainedConfig:
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        return made(self.sizes | {"max_position_embeddings": MAX_LENGTH, "rope_parameters": rope})

    def build(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Random weights, made on the device."""
        torch.manual_seed(SEED)
        with device:
            model: PreTrainedModel = AutoModel.from_config(self.config(), dtype=dtype)  # type: ignore[no-untyped-call]
            model.eval()  # type: ignore[no-untyped-call]
            return model


SHAPES = {"4b": Shape("Qwen3-4B", PUBLISHED["qwen3-4b"], 2.95), "8b": Shape("Qwen3-8B", PUBLISHED["qwen3-8b"], 3.77)}
# Every step of the benchmark in seconds, on a CPU.
TINY_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
TINY = {
    name: Shape(f"tiny ({name})", shape.sizes | TINY_SIZES | {"vocab_size": 160_000}) for name, shape in SHAPES.items()
}


def tokenizer_of(folder: Path) -> str:
    """Returns the folder's tokenizer as JSON, ending each text with EOS if it is a decoder's."""
    if (folder / CONFIG_FILE).is_file():
        return read_tokenizer(folder, Pooling.EOS, read_config(folder))
    return (folder / TOKENIZER_FILE).read_text(encoding="utf-8")


def load_texts(corpus: Path, count: int) -> list[str]:
    """Titles and texts of documents drawn at random, the same ones each time; again from the start if they are few."""
    rows = [json.loads(line.text) for line in read_lines(corpus)]
    texts = [f"{row.get('title') or ''}\n{row['text']}".strip() for row in rows]
    random.Random(SEED).shuffle(texts)
    return (texts * (count // len(texts) + 1))[:count]


ROUNDS = 5
# Long enough for the GPU to reach the clock that it keeps under load.
ROUND_SECONDS = 0.3
# A rough rate, to choose how many calls make a round.
EXPECTED = 600e12


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds until the device has finished the work."""
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> str:
    """Returns the median of several figures, and the lowest and highest."""
    return f"{median(values):.1f} ({min(values):.1f} … {max(values):.1f})"


def repeated(work: Callable[[], object], device: torch.device, rounds: int, calls: int) -> float:
    """Median seconds of one call, in rounds of several, after one round that does not count."""

    def run() -> None:
        for _ in range(calls):
            work()

    run()
    return median(seconds(run, device) / calls for _ in range(rounds))


def ceiling(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Any]:
    """TFLOP/s of square products in `dtype` and in fp8, random values in both; the best size counts."""
    found: dict[str, Any] = {"bf16": {}, "fp8": {}}
    for size in sizes:
        one, two = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        calls = _calls(2.0 * size**3, device)
        plain = repeated(partial(torch.mm, one, two.t()), device, ROUNDS, calls)
        found["bf16"][size] = 2 * size**3 / plain / 1e12
        scaled = repeated(partial(Scaled.of(Dense(two)), quantise(one)), device, ROUNDS, calls)
        found["fp8"][size] = 2 * size**3 / scaled / 1e12
        print(f"  {size}³: bf16 {found['bf16'][size]:.1f} TFLOP/s, fp8 by rows {found['fp8'][size]:.1f}", flush=True)
    return found | {"bf16_best": max(found["bf16"].values()), "fp8_best": max(found["fp8"].values())}


def products(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, dict[str, float]]:
    """TFLOP/s of a layer's four products on this number of tokens: by each library, in place, and in fp8."""
    on_gpu = device.type == "cuda"
    narrow = torch.compile(quantise) if on_gpu else quantise
    found: dict[str, dict[str, float]] = {}
    for name, (rows, columns) in shape.matrices().items():
        dense = Dense(torch.randn(rows, columns, device=device, dtype=dtype))
        inputs = torch.randn(tokens, columns, device=device, dtype=dtype)
        residual = torch.zeros(tokens, rows, device=device, dtype=dtype)
        scaled, quantised = Scaled.of(dense), quantise(inputs)
        ways: dict[str, Callable[[], object]] = {
            "plain": partial(dense, inputs),
            "in place": partial(dense.add_to, residual, inputs),
            "fp8": partial(scaled, quantised),
            "fp8 with quantising": lambda scaled=scaled, inputs=inputs: scaled(narrow(inputs)),  # type: ignore[misc]
        }
        rates: dict[str, float] = {}
        for library in ("cublas", "cublaslt") if on_gpu else ("cpu",):
            if on_gpu:
                torch.backends.cuda.preferred_blas_library(library)
            for way, work in ways.items():
                flops = 2.0 * rows * columns * tokens
                label = f"{library} {way}" if on_gpu else way
                rates[label] = flops / repeated(work, device, ROUNDS, _calls(flops, device)) / 1e12
        if on_gpu:
            torch.backends.cuda.preferred_blas_library("default")
        found[name] = rates
        shown = ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
        print(f"  {shape.name} {name} {rows} × {columns}: {shown} TFLOP/s", flush=True)
    return found


def _calls(flops: float, device: torch.device) -> int:
    """Returns how many products make a round."""
    return max(2, int(ROUND_SECONDS * EXPECTED / flops)) if device.type == "cuda" else 1

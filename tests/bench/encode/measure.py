"""One shape: which attention is quickest, how near the card's limit it comes, and sentence-transformers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from models.encoder.packed.attention import BACKENDS as OWN
from models.encoder.packed.encoder import PackedEncoder, batches, tokenised
from models.encoder.packed.kernels import Packed, pack
from models.encoder.packed.model import PackedModel
from models.encoder.packed.weights import read_weights
from models.encoder.spec import Side
from models.encoder.tokenizer import Tokenizer
from tests.bench.encode.clock import Spread, repeated, seconds
from tests.bench.encode.flex import flex
from tests.bench.encode.peer import PeerRun
from tests.bench.encode.shapes import MAX_LENGTH, Shape, encoder_of

BACKENDS = {**OWN, "flex": flex}


@dataclass(frozen=True)
class Plan:
    """How much is measured, and where."""

    device: torch.device
    dtype: torch.dtype
    budget: int
    rounds: int
    compiled: bool
    """whether compiling is tried"""


@dataclass(frozen=True)
class Corpus:
    texts: list[str]
    tokenizer_json: str

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_json(self.tokenizer_json, MAX_LENGTH)

    def lengths(self, count: int | None = None) -> list[int]:
        return [len(tokens) for tokens in self.tokenizer.batch(self.texts[:count])]


def one_batch(corpus: Corpus, plan: Plan) -> tuple[Packed, list[int]]:
    """The middle batch of the corpus, neither its longest nor its shortest texts, and their lengths."""
    every = list(batches(tokenised(corpus.texts, corpus.tokenizer), lambda: plan.budget))
    chosen = [item.tokens for item in every[len(every) // 2]]
    return pack(chosen, plan.device), [len(tokens) for tokens in chosen]


def try_ways(shape: Shape, model: PreTrainedModel, corpus: Corpus, plan: Plan, ceiling: float) -> dict[str, Any]:
    """One batch by every attention, compiled and not: TFLOP/s, share of the ceiling, nearness to padded attention."""
    batch, lengths = one_batch(corpus, plan)
    work = shape.flops(lengths)
    weights = read_weights(model, MAX_LENGTH, plan.device)
    names = [name for name in ("padded", "varlen", "flex") if plan.device.type == "cuda" or name == "padded"]
    found: dict[str, Any] = {}
    expected: torch.Tensor | None = None
    for compiled in (False, True) if plan.compiled else (False,):
        for name in names:
            way = f"{name}{', compiled' if compiled else ''}"
            try:
                decoder = PackedModel(weights, BACKENDS[name], compiled=compiled)
                hidden = decoder(batch).float()
                taken = repeated(lambda decoder=decoder: decoder(batch), plan.device, plan.rounds, 2)
            except Exception as error:  # a way that does not run here is a result, not the end
                print(f"  {shape.name} {way}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                found[way] = {"error": str(error)[:300]}
                continue
            expected = hidden if expected is None else expected
            cosine = torch.nn.functional.cosine_similarity(hidden, expected).min().item()
            rate = work / taken.middle / 1e12
            found[way] = {"tflops": rate, "share": rate / ceiling, "seconds": taken.middle, "cosine": cosine}
            print(f"  {shape.name} {way}: {rate:.1f} TFLOP/s, {rate / ceiling:.1%} of the ceiling, "
                  f"least cosine to the first {cosine:.5f}", flush=True)  # fmt: skip
    return {"tokens": sum(lengths), "documents": len(lengths), "ways": found}


def best_way(tried: dict[str, Any]) -> tuple[str, bool]:
    """The quickest attention that agrees with the padded one, and whether compiled."""
    right = {way: one["tflops"] for way, one in tried["ways"].items() if one.get("cosine", 0) > 0.99}
    name, _, compiled = max(right, key=lambda way: right[way]).partition(", ")
    return name, bool(compiled)


def at_length(
    shape: Shape, encoders: dict[str, PackedEncoder], corpus: Corpus, plan: Plan, ceiling: float,
    peer: PeerRun | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All texts from strings to vectors, by each encoder and the peer in turn, several times."""
    works: dict[str, Any] = {
        name: lambda encoder=encoder: encoder.encode(corpus.texts, Side.DOCUMENT) for name, encoder in encoders.items()
    }
    if peer is not None:
        works["sentence-transformers"] = lambda: peer.encode(corpus.texts)
    for name in encoders:
        works[name]()  # compiled for every shape that comes
    taken: dict[str, list[float]] = {name: [] for name in works}
    vectors: dict[str, np.ndarray] = {}
    for _ in range(plan.rounds):
        for name, work in works.items():
            taken[name].append(seconds(lambda name=name, work=work: vectors.update({name: work()}), plan.device))
    lengths = corpus.lengths()
    found = {name: _figures(shape, lengths, times, ceiling) for name, times in taken.items()}
    if peer is not None:
        found["sentence-transformers"] |= {"attention": peer.attention, "batch_size": peer.batch_size}
    _compare(found, vectors)
    for name, figures in found.items():
        print(f"  {shape.name} {name}: {figures['said']}", flush=True)
    return {"documents": len(lengths), "tokens": sum(lengths), "paper_hours": shape.paper_hours, "runs": found}


def _figures(shape: Shape, lengths: Sequence[int], times: list[float], ceiling: float) -> dict[str, Any]:
    rates = Spread.of([len(lengths) / one for one in times])
    tflops = shape.flops(lengths) / len(lengths) * rates.middle / 1e12
    nominal = shape.flops(lengths, nominal=True) / len(lengths) * rates.middle / 1e12
    hours = 1e6 / rates.middle / 3600
    said = f"{rates} docs/s, {tflops:.1f} TFLOP/s, {tflops / ceiling:.1%} of the ceiling, {hours:.2f} h a million"
    return {
        "docs_per_second": rates.middle, "least": rates.least, "most": rates.most, "tflops": tflops,
        "share": tflops / ceiling, "nominal_share": nominal / ceiling, "hours_per_million": hours, "said": said,
    }  # fmt: skip


def _compare(found: dict[str, Any], vectors: dict[str, np.ndarray]) -> None:
    """Adds to each run its speed and its cosines against the first."""
    first, *_ = vectors
    base = vectors[first]
    for name, figures in found.items():
        other = vectors[name][:, : base.shape[1]]
        cosines = (base * (other / np.linalg.norm(other, axis=1, keepdims=True))).sum(axis=1)
        figures["speed"] = figures["docs_per_second"] / found[first]["docs_per_second"]
        figures["cosine_least"], figures["cosine_mean"] = float(cosines.min()), float(cosines.mean())
        figures["said"] += f", {figures['speed']:.2f} × {first}, cosine {cosines.min():.4f} at least"


def measured_encoder(
    shape: Shape, model: PreTrainedModel, corpus: Corpus, plan: Plan, way: tuple[str, bool], *,
    fp8: bool = False, keep: Sequence[str] = (),
) -> PackedEncoder:  # fmt: skip
    options = {"budget": plan.budget, "compiled": way[1], "fp8": fp8, "keep": keep}
    return encoder_of(shape, model, corpus.tokenizer, BACKENDS[way[0]], **options)

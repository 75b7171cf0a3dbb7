"""Measures an LLM encoder: each attention, its speed at length beside sentence-transformers, and what fp8 costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel

from models.bench.shapes import DIM, MAX_LENGTH, TINY, Shape, repeated, seconds, spread
from models.encoder.folder import infer_spec
from models.encoder.packed.attention import BACKENDS
from models.encoder.packed.encoder import PackedEncoder, PackedModel, batches, tokenised
from models.encoder.packed.kernels import Packed, pack
from models.encoder.packed.weights import read_weights
from models.encoder.spec import TOKENIZER_FILE, EncoderSpec, Pooling, Precision, Side
from models.encoder.tokenizer import Tokenizer
from models.encoder.torch import TorchEncoder

NEAR = 0.99
WORST_CHARACTERS = 40


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

    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokenizer.batch(self.texts)]


def one_batch(corpus: Corpus, plan: Plan) -> tuple[Packed, list[int]]:
    """Returns the middle batch of the corpus, neither its longest nor its shortest texts, and their lengths."""
    every = list(batches(tokenised(corpus.texts, corpus.tokenizer), lambda: plan.budget))
    chosen = [item.tokens for item in every[len(every) // 2]]
    return pack(chosen, plan.device), [len(tokens) for tokens in chosen]


def try_ways(shape: Shape, model: PreTrainedModel, corpus: Corpus, plan: Plan, ceiling: float) -> dict[str, Any]:
    """Runs one batch by every attention, compiled and not: TFLOP/s, share of the ceiling, nearness to padded."""
    batch, lengths = one_batch(corpus, plan)
    work = shape.flops(lengths)
    weights = read_weights(model, MAX_LENGTH, plan.device)
    names = ("padded", "varlen") if plan.device.type == "cuda" else ("padded",)
    found: dict[str, Any] = {}
    expected: torch.Tensor | None = None
    for compiled in (False, True) if plan.compiled else (False,):
        for name in names:
            way = f"{name}{', compiled' if compiled else ''}"
            try:
                decoder = PackedModel(weights, BACKENDS[name], compiled=compiled)
                hidden = decoder(batch).float()
                taken = repeated(partial(decoder, batch), plan.device, plan.rounds, 2)
            except Exception as error:  # a way that does not run here is a result, not the end
                print(f"  {shape.name} {way}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                found[way] = {"error": str(error)[:300]}
                continue
            expected = hidden if expected is None else expected
            cosine = torch.nn.functional.cosine_similarity(hidden, expected).min().item()
            rate = work / taken / 1e12
            found[way] = {"tflops": rate, "share": rate / ceiling, "seconds": taken, "cosine": cosine}
            print(f"  {shape.name} {way}: {rate:.1f} TFLOP/s, {rate / ceiling:.1%} of the ceiling, "
                  f"least cosine to the first {cosine:.5f}", flush=True)  # fmt: skip
    return {"tokens": sum(lengths), "documents": len(lengths), "ways": found}


def best_way(tried: dict[str, Any]) -> tuple[str, bool]:
    """Returns the quickest attention that agrees with the padded one, and whether compiled."""
    right = {way: one["tflops"] for way, one in tried["ways"].items() if one.get("cosine", 0) > 0.99}
    name, _, compiled = max(right, key=lambda way: right[way]).partition(", ")
    return name, bool(compiled)


def at_length(
    shape: Shape, encoders: dict[str, PackedEncoder], corpus: Corpus, plan: Plan, ceiling: float,
    peer: Peer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Encodes all texts, from strings to vectors, by each encoder and the peer in turn, several times."""
    works: dict[str, Any] = {
        name: partial(encoder.encode, corpus.texts, Side.DOCUMENT) for name, encoder in encoders.items()
    }
    if peer is not None:
        works["sentence-transformers"] = lambda: peer.encode(corpus.texts)
    for name in encoders:
        works[name]()  # compiled for every shape that comes
    taken: dict[str, list[float]] = {name: [] for name in works}
    vectors: dict[str, np.ndarray] = {}
    for _ in range(plan.rounds):
        for name, work in works.items():
            taken[name].append(seconds(partial(_store, vectors, name, work), plan.device))
    lengths = corpus.lengths()
    found = {name: _figures(shape, lengths, times, ceiling) for name, times in taken.items()}
    if peer is not None:
        found["sentence-transformers"] |= {"attention": peer.attention, "batch_size": peer.batch_size}
    _compare(found, vectors)
    for name, figures in found.items():
        print(f"  {shape.name} {name}: {figures['said']}", flush=True)
    return {"documents": len(lengths), "tokens": sum(lengths), "paper_hours": shape.paper_hours, "runs": found}


def _store(vectors: dict[str, np.ndarray], name: str, work: Callable[[], np.ndarray]) -> None:
    vectors[name] = work()


def _figures(shape: Shape, lengths: Sequence[int], times: list[float], ceiling: float) -> dict[str, Any]:
    rates = [len(lengths) / one for one in times]
    middle = median(rates)
    tflops = shape.flops(lengths) / len(lengths) * middle / 1e12
    hours = 1e6 / middle / 3600
    work = f"{tflops:.1f} TFLOP/s, {tflops / ceiling:.1%} of the ceiling"
    summary = f"{spread(rates)} docs/s, {work}, {hours:.2f} h a million"
    return {
        "docs_per_second": middle, "least": min(rates), "most": max(rates), "tflops": tflops,
        "share": tflops / ceiling, "hours_per_million": hours, "said": summary,
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


def encoder_of(
    shape: Shape, model: PreTrainedModel, corpus: Corpus, plan: Plan, way: tuple[str, bool], *, fp8: bool = False
) -> PackedEncoder:
    spec = EncoderSpec(
        architecture="qwen3", sides=(Side.DOCUMENT,), pooling=Pooling.EOS, native_dim=shape.sizes["hidden_size"],
        dim=min(DIM, shape.sizes["hidden_size"]), max_length=MAX_LENGTH, space="bench",
    )  # fmt: skip
    return _packed(spec, model, corpus.tokenizer, plan, way, fp8=fp8)


def _packed(
    spec: EncoderSpec, model: PreTrainedModel, tokenizer: Tokenizer, plan: Plan, way: tuple[str, bool], *, fp8: bool
) -> PackedEncoder:
    weights = read_weights(model, spec.max_length, plan.device, fp8=fp8)
    decoder = PackedModel(weights, BACKENDS[way[0]], compiled=way[1])
    precision = Precision.FP8 if fp8 else Precision.BF16
    return PackedEncoder(spec, precision, tokenizer, (), decoder, plan.device, plan.budget)


def fp8_cosines(folder: Path, corpus: Corpus, plan: Plan, way: str) -> dict[str, Any]:
    """Cosines over the corpus's texts and over their beginnings, tokenised by the folder's own tokenizer."""
    spec = infer_spec(folder, space="bench")
    spec = spec.model_copy(update={"dim": min(DIM, spec.native_dim)})
    whole = len(corpus.texts)
    texts = corpus.texts + beginnings(corpus.texts)

    def vectors(way: str, dtype: torch.dtype, *, fp8: bool = False) -> np.ndarray:
        encoder = TorchEncoder.load(folder, spec, dtype=dtype)
        packed = _packed(spec, encoder.backbone, encoder.tokenizer, plan, (way, False), fp8=fp8)
        return packed.encode(texts, Side.DOCUMENT)

    wide, plain, narrow = vectors("padded", torch.float32), vectors(way, plan.dtype), vectors(way, plan.dtype, fp8=True)
    pairs = {"bf16 to fp32": (plain, wide), "fp8 to bf16": (narrow, plain), "fp8 to fp32": (narrow, wide)}
    found = {}
    for name, (one, two) in pairs.items():
        for kind, rows in (("", slice(whole)), (", beginnings", slice(whole, None))):
            found[name + kind] = figures = cosines(one[rows], two[rows], texts[rows])
            worst = f"least {figures['least']:.5f} ({figures['worst']!r}), {figures['below']:.2%} below {NEAR}"
            print(f"  {folder.name} {name}{kind}: cosine mean {figures['mean']:.5f}, {worst}", flush=True)
    return {"folder": folder.name, "texts": whole, "cosines": found}


def beginnings(texts: Sequence[str]) -> list[str]:
    """Cuts texts to a few characters, like names: fp8 affects them more than long texts, and a mean hides it."""
    return list(dict.fromkeys(text[: 2 + row % 6].strip() for row, text in enumerate(texts)))


def cosines(one: np.ndarray, two: np.ndarray, texts: Sequence[str]) -> dict[str, Any]:
    """Compares unit vectors of the same texts: returns the worst text by name, and the share below `NEAR`."""
    found = (one * two).sum(axis=1)
    return {
        "least": float(found.min()),
        "worst": texts[int(found.argmin())][:WORST_CHARACTERS],
        "p1": float(np.quantile(found, 0.01)),
        "below": float((found < NEAR).mean()),
        "mean": float(found.mean()),
    }


BATCH_SIZES = (32, 64, 128, 256)


class Peer:
    """Encodes texts by sentence-transformers; `choose` finds the attention and the batch size that are quickest."""

    def __init__(self, model: PreTrainedModel, tokenizer_json: str) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

        self.attention, self.batch_size = "sdpa", BATCH_SIZES[0]
        self._model = model
        with TemporaryDirectory(prefix="care-peer-") as folder:
            _write_stand_in(Path(folder), tokenizer_json)
            body = Transformer(folder, max_seq_length=MAX_LENGTH)
        # The folder holds a model of two rows; the one that is measured takes its place, under either name.
        setattr(body, "model" if "model" in body._modules else "auto_model", model)
        pooling = Pooling(model.config.hidden_size, pooling_mode="lasttoken")
        device = next(model.parameters()).device
        self._sentence = SentenceTransformer(modules=[body, pooling, Normalize()], device=str(device))

    def encode(self, texts: list[str]) -> np.ndarray:
        self._model.set_attn_implementation(self.attention)
        return np.asarray(self._sentence.encode(texts, batch_size=self.batch_size, show_progress_bar=False))

    def choose(self, texts: list[str], time: Callable[[Callable[[], object]], float]) -> None:
        """Takes the quickest attention and batch size that run here."""
        found: dict[tuple[str, int], float] = {}
        for attention in ("sdpa", "flash_attention_2") if find_spec("flash_attn") else ("sdpa",):
            for size in BATCH_SIZES:
                self.attention, self.batch_size = attention, size
                try:
                    self.encode(texts[:size])
                    found[attention, size] = time(partial(self.encode, texts))
                except (torch.OutOfMemoryError, ImportError, ValueError, RuntimeError) as error:
                    print(f"  {attention}, batches of {size}: {str(error).splitlines()[0]}", flush=True)
                    continue
                rate = len(texts) / found[attention, size]
                print(f"  sentence-transformers, {attention}, batches of {size}: {rate:.1f} docs/s", flush=True)
        self.attention, self.batch_size = min(found, key=lambda how: found[how])


def _write_stand_in(folder: Path, tokenizer_json: str) -> None:
    """Writes a transformers folder with the tokenizer and a model that loads at once."""
    config = Shape("", TINY["4b"].sizes | {"vocab_size": 2}).config()
    AutoModel.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
    pad = json.loads(tokenizer_json)["added_tokens"][0]["content"]
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "model_max_length": MAX_LENGTH}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")

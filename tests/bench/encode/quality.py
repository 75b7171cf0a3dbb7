"""What fp8 costs on real weights: cosines to bf16 and of both to fp32, for several choices of what stays in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.packed.attention import BACKENDS
from models.packed.decoder import PackedDecoder
from models.packed.encoder import PackedEncoder
from models.packed.weights import EDGES, read_weights
from models.spec import EncoderSpec, Precision, Side
from models.tokenizer import Tokenizer
from models.torch_encoder import TorchEncoder
from models.transformers_folder import infer_spec
from tests.bench.encode.measure import Corpus, Plan
from tests.bench.encode.shapes import DIM

KEEPS: tuple[tuple[str, ...], ...] = ((), (EDGES,), ("down",), ("down", EDGES), ("qkv", "out", EDGES))


def fp8_cosines(folder: Path, corpus: Corpus, plan: Plan, way: str) -> dict[str, Any]:
    """Least and mean cosine over the corpus's texts, tokenised by the folder's own tokenizer."""
    spec = infer_spec(folder, space="bench")
    spec = spec.model_copy(update={"dim": min(DIM, spec.native_dim)})
    wide = _vectors(folder, spec, corpus, plan, "padded", torch.float32, fp8=False)
    plain = _vectors(folder, spec, corpus, plan, way, plan.dtype, fp8=False)
    found = {"bf16 to fp32": _cosines(plain, wide)}
    for keep in KEEPS:
        name = f"fp8{' but ' + ' '.join(keep) if keep else ''}"
        vectors = _vectors(folder, spec, corpus, plan, way, plan.dtype, fp8=True, keep=keep)
        found[f"{name} to bf16"] = _cosines(vectors, plain)
        found[f"{name} to fp32"] = _cosines(vectors, wide)
    for name, figures in found.items():
        said = ", ".join(f"{kind} {value:.5f}" for kind, value in figures.items())
        print(f"  {folder.name} {name}: cosine {said}", flush=True)
    return {"folder": folder.name, "texts": len(corpus.texts), "cosines": found}


def _vectors(
    folder: Path, spec: EncoderSpec, corpus: Corpus, plan: Plan, way: str, dtype: torch.dtype, *,
    fp8: bool, keep: tuple[str, ...] = (),
) -> np.ndarray:  # fmt: skip
    encoder = TorchEncoder.load(folder, spec, dtype=dtype)
    weights = read_weights(encoder.backbone, spec.max_length, plan.device, fp8=fp8, keep=keep)
    decoder = PackedDecoder(weights, BACKENDS[way])
    tokenizer = Tokenizer.from_json(encoder.tokenizer_json, spec.max_length)
    packed = PackedEncoder(
        spec, Precision.FP8 if fp8 else Precision.BF16, tokenizer, (), decoder, plan.device, plan.budget
    )
    return packed.encode(corpus.texts, Side.DOCUMENT)


def _cosines(one: np.ndarray, two: np.ndarray) -> dict[str, float]:
    cosines = (one * two).sum(axis=1)
    return {"least": float(cosines.min()), "p1": float(np.quantile(cosines, 0.01)), "mean": float(cosines.mean())}

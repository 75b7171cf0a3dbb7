"""What fp8 costs on real weights: cosines to bf16 and of both to fp32, for several choices of what stays in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.encoder.folder import infer_spec
from models.encoder.packed.attention import BACKENDS
from models.encoder.packed.encoder import PackedEncoder
from models.encoder.packed.model import PackedModel
from models.encoder.packed.weights import EDGES, read_weights
from models.encoder.spec import EncoderSpec, Precision, Side
from models.encoder.tokenizer import Tokenizer
from models.encoder.torch import TorchEncoder
from tests.bench.encode.measure import Corpus, Plan
from tests.bench.encode.shapes import DIM

KEEPS: tuple[tuple[str, ...], ...] = ((), (EDGES,), ("down",), ("down", EDGES), ("qkv", "out", EDGES))
NEAR = 0.99
WORST_CHARACTERS = 40


def fp8_cosines(folder: Path, corpus: Corpus, plan: Plan, way: str) -> dict[str, Any]:
    """Cosines over the corpus's texts and over their beginnings, tokenised by the folder's own tokenizer."""
    spec = infer_spec(folder, space="bench")
    spec = spec.model_copy(update={"dim": min(DIM, spec.native_dim)})
    whole = len(corpus.texts)
    texts = corpus.texts + beginnings(corpus.texts)
    wide = _vectors(folder, spec, texts, plan, "padded", torch.float32, fp8=False)
    plain = _vectors(folder, spec, texts, plan, way, plan.dtype, fp8=False)
    pairs = {"bf16 to fp32": (plain, wide)}
    for keep in KEEPS:
        name = f"fp8{' but ' + ' '.join(keep) if keep else ''}"
        vectors = _vectors(folder, spec, texts, plan, way, plan.dtype, fp8=True, keep=keep)
        pairs |= {f"{name} to bf16": (vectors, plain), f"{name} to fp32": (vectors, wide)}
    found = {}
    for name, (one, two) in pairs.items():
        for kind, rows in (("", slice(whole)), (", beginnings", slice(whole, None))):
            found[name + kind] = figures = cosines(one[rows], two[rows], texts[rows])
            said = f"least {figures['least']:.5f} ({figures['worst']!r}), {figures['below']:.2%} below {NEAR}"
            print(f"  {folder.name} {name}{kind}: cosine mean {figures['mean']:.5f}, {said}", flush=True)
    return {"folder": folder.name, "texts": whole, "cosines": found}


def beginnings(texts: Sequence[str]) -> list[str]:
    """Texts of a few characters, as names are: they suffer otherwise than long ones, and a mean does not show it."""
    return list(dict.fromkeys(text[: 2 + row % 6].strip() for row, text in enumerate(texts)))


def _vectors(
    folder: Path, spec: EncoderSpec, texts: Sequence[str], plan: Plan, way: str, dtype: torch.dtype, *,
    fp8: bool, keep: tuple[str, ...] = (),
) -> np.ndarray:  # fmt: skip
    encoder = TorchEncoder.load(folder, spec, dtype=dtype)
    weights = read_weights(encoder.backbone, spec.max_length, plan.device, fp8=fp8, keep=keep)
    decoder = PackedModel(weights, BACKENDS[way])
    tokenizer = Tokenizer.from_json(encoder.tokenizer_json, spec.max_length)
    packed = PackedEncoder(
        spec, Precision.FP8 if fp8 else Precision.BF16, tokenizer, (), decoder, plan.device, plan.budget
    )
    return packed.encode(texts, Side.DOCUMENT)


def cosines(one: np.ndarray, two: np.ndarray, texts: Sequence[str]) -> dict[str, Any]:
    """How near the unit vectors of the same texts are: the worst text by name, and the share that is not near."""
    found = (one * two).sum(axis=1)
    return {
        "least": float(found.min()),
        "worst": texts[int(found.argmin())][:WORST_CHARACTERS],
        "p1": float(np.quantile(found, 0.01)),
        "below": float((found < NEAR).mean()),
        "mean": float(found.mean()),
    }

"""Turns a published cross-encoder into a reranker folder, and compares its scores with transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from models.encoder.folder import read_config
from models.encoder.pairs import RerankerSpec
from models.encoder.torch import DTYPES, published_dtype
from models.encoder.torch_reranker import TorchReranker, require_reranker
from models.errors import BadEncoder, ParityError
from models.export.parity import Vectors, check_pairs
from models.importing.options import ImportOptions

# The most that a score may differ from transformers', in their standard deviations: sums in another order.
CEILING = 0.01


@dataclass(frozen=True, slots=True)
class ImportedReranker:
    """A reranker folder that was written, and the largest difference of its scores from transformers'."""

    folder: Path
    spec: RerankerSpec
    parameters: int
    weight_bytes: int
    pairs: int
    difference: float


def import_reranker(source: Path, staged: Path, final: Path, options: ImportOptions) -> ImportedReranker:
    """Writes the folder `staged`, which will lie at `final`, and compares its scores with transformers'."""
    for name in ("space", "pooling", "dim", "query_instruction", "document_instruction", "adapter"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise BadEncoder(f"--{flag}: {source} is a cross-encoder, which gives scores and no vectors; leave it out")
    stated = published_dtype(require_reranker(source))
    dtype = DTYPES[options.dtype] if options.dtype else stated
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    typed = "token_type_ids" in tokenizer.model_input_names
    TorchReranker.load(source, dtype=dtype, max_length=options.max_length, token_types=typed).save(staged)
    reranker = TorchReranker.load(staged).float()
    half = reranker.spec.max_length // 2
    # transformers cuts the document alone; a query that we would cut as well cannot be compared.
    pairs = [pair for pair in check_pairs() if len(reranker.tokenizer.query(pair[0])) < half]
    found = reranker.score([reranker.tokenizer.pairs(query, [document])[0] for query, document in pairs])
    expected = _transformers_scores(source, tokenizer, pairs, reranker.spec.max_length)
    difference = float(np.abs(found - expected).max() / max(float(expected.std()), 1e-6))
    # Written so that NaN, which compares false with everything, is refused too.
    if not difference <= CEILING:
        raise ParityError(
            f"{source}: scores differ from transformers' by up to {difference:.4f} of their deviation (at most "
            f"{CEILING}); its tokenizer may join pairs in a way of its own, which is not supported"
        )
    return ImportedReranker(
        folder=final,
        spec=RerankerSpec.load(staged),
        parameters=sum(parameter.numel() for parameter in reranker.parameters()),
        weight_bytes=sum(path.stat().st_size for path in staged.glob("*.safetensors")),
        pairs=len(pairs),
        difference=difference,
    )


@torch.inference_mode()
def _transformers_scores(
    source: Path, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]], max_length: int
) -> Vectors:
    """Scores by transformers' own tokenizer and model, one pair at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(
        source, local_files_only=True, dtype=torch.float32, config=read_config(source), weights_only=True
    ).eval()
    scores = []
    for query, document in pairs:
        inputs = tokenizer(query, document, truncation="only_second", max_length=max_length, return_tensors="pt")
        scores.append(float(model(**inputs).logits[0, 0]))
    return np.array(scores, dtype=np.float32)

"""Reranker in torch, for training and export: transformers' sequence classification with one label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from models.encoder.folder import DEFAULT_MAX_LENGTH, check_length, positions_of, read_config, read_tokenizer
from models.encoder.pairs import SEPARATORS, PairTokenizer, RerankerSpec, is_reranker
from models.encoder.spec import TOKENIZER_FILE, Pooling, sha256_of, verify_file
from models.encoder.tokenizer import Tokens, pad
from models.encoder.torch import load_model, weight_files
from models.errors import BadEncoder

Scores = NDArray[np.float32]
# What a backbone without a head lacks; training begins with random weights there.
HEAD = ("classifier.", "bert.pooler.")


class TorchReranker(nn.Module):
    """A function from the token ids of pairs to scores, which are logits."""

    def __init__(self, model: PreTrainedModel, spec: RerankerSpec, tokenizer_json: str) -> None:
        super().__init__()
        self.model, self.spec, self.tokenizer_json = model, spec, tokenizer_json
        self.tokenizer = PairTokenizer(tokenizer_json, spec)
        self.separator = self.tokenizer.query("").ids[-1]

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        max_length: int | None = None,
        token_types: bool = True,
    ) -> TorchReranker:
        """Opens a reranker folder, verified by its checksums, or a published one; in eval mode.

        `token_types` says whether the published one was trained with types of tokens, if it has any.
        """
        if is_reranker(folder):
            spec = RerankerSpec.load(folder)
            for name in (TOKENIZER_FILE, *weight_files(folder)):
                verify_file(folder, name, spec)
        config = require_reranker(folder)
        return cls._open(folder, config, dtype, max_length, token_types=token_types)

    @classmethod
    def start(cls, folder: Path, max_length: int) -> TorchReranker:
        """Opens what training begins with: a reranker, or an encoder's backbone with a new head; in eval mode."""
        config = read_config(folder)
        require_architecture(folder, config)
        config.num_labels = 1
        return cls._open(folder, config, torch.float32, max_length, new_head=True)

    @classmethod
    def _open(
        cls, folder: Path, config: PretrainedConfig, dtype: torch.dtype, max_length: int | None, *,
        new_head: bool = False, token_types: bool = True,
    ) -> TorchReranker:  # fmt: skip
        own = RerankerSpec.load(folder) if is_reranker(folder) else None
        longest = max_length or (own.max_length if own else min(positions_of(config), DEFAULT_MAX_LENGTH))
        check_length(folder, config, longest)
        model = load_model(AutoModelForSequenceClassification, folder, config, dtype, new=HEAD if new_head else ())
        kind = config.model_type
        typed = own.token_types if own else token_types and kind == "bert" and config.type_vocab_size > 1
        spec = RerankerSpec(architecture=kind, max_length=longest, separators=SEPARATORS[kind], token_types=typed)
        return cls(model, spec, read_tokenizer(folder, Pooling.CLS, config)).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns scores (pairs,) in float32 of ids and mask (pairs, tokens)."""
        types = {}
        if self.spec.token_types:
            types["token_type_ids"] = pair_types(input_ids, attention_mask, self.separator)
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return logits[:, 0].float()

    @torch.inference_mode()
    def score(self, pairs: Sequence[Tokens], batch_size: int = 64) -> Scores:
        """Returns scores of tokenised pairs in the order given, in batches of like lengths."""
        order = sorted(range(len(pairs)), key=lambda row: len(pairs[row]), reverse=True)
        scores = np.empty(len(pairs), dtype=np.float32)
        device = next(self.parameters()).device
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids, mask = (torch.from_numpy(array).to(device) for array in pad([pairs[row] for row in rows]))
            scores[rows] = self(ids, mask).cpu().numpy()
        return scores

    def save(self, folder: Path) -> None:
        """Writes a reranker folder that `load` opens again, and transformers too; `reranker.json` comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder, save_original_format=False)
        (folder / TOKENIZER_FILE).write_text(self.tokenizer_json, encoding="utf-8")
        checksums = {name: sha256_of(folder / name) for name in (TOKENIZER_FILE, *weight_files(folder))}
        self.spec.model_copy(update={"checksums": checksums, "parity": {}, "weights": None}).save(folder)


def pair_types(ids: Tensor, mask: Tensor, separator: int) -> Tensor:
    """0 up to the first separator, 1 for the document, 0 for padding: (pairs, tokens)."""
    ends = (ids == separator).long()
    return ((ends.cumsum(dim=1) - ends) > 0).long() * mask


def is_sequence_classifier(folder: Path) -> bool:
    """Returns whether a checkpoint says of itself that it classifies sequences, as cross-encoders do."""
    return any(name.endswith("ForSequenceClassification") for name in read_config(folder).architectures or ())


def require_reranker(folder: Path) -> PretrainedConfig:
    """Returns the configuration of a published cross-encoder; refuses other checkpoints by name."""
    config = read_config(folder)
    require_architecture(folder, config)
    kinds = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in kinds):
        what = " or ".join(kinds) or "no architecture"
        raise BadEncoder(f"{folder}: a reranker is a …ForSequenceClassification; {what} gives no score of a pair")
    if config.num_labels != 1:
        raise BadEncoder(
            f"{folder}: the classifier has {config.num_labels} labels; a reranker has one, the relevance of a pair"
        )
    return config


def require_architecture(folder: Path, config: PretrainedConfig) -> None:
    if config.model_type not in SEPARATORS:
        known = ", ".join(SEPARATORS)
        raise BadEncoder(f"{folder}: a {config.model_type} is not supported as a reranker, only {known}")

"""The models that are measured, made of random weights on the device, and what a forward pass through them costs."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel, Qwen3Config

from models.encoder.folder import CONFIG_FILE, read_config, read_tokenizer
from models.encoder.spec import TOKENIZER_FILE, Pooling
from models.training.shapes import SHAPES as PUBLISHED

MAX_LENGTH = 512
DIM = 768
SEED = 7


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder, as its config.json has it; `paper_hours` is what the paper took for a million documents."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    width: int
    intermediate: int
    vocabulary: int
    paper_hours: float | None = None

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's four products."""
        joint = (self.heads + 2 * self.key_heads) * self.width
        return {
            "qkv": (joint, self.hidden),
            "out": (self.hidden, self.heads * self.width),
            "up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
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
        products = 2.0 * ((self.layers - 1) * layer * tokens + last)
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return products + 4.0 * self.layers * self.heads * self.width * pairs

    def build(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Random weights, made on the device."""
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.width,
            intermediate_size=self.intermediate,
            max_position_embeddings=MAX_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            use_cache=False,
        )
        torch.manual_seed(SEED)
        with device:
            model: PreTrainedModel = AutoModel.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            model.eval()  # type: ignore[no-untyped-call]
            return model


def _published(name: str, paper_hours: float) -> Shape:
    shape = PUBLISHED[name.lower()]
    heads = (shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])
    sizes = (shape["intermediate_size"], shape["vocab_size"])
    return Shape(name, shape["hidden_size"], shape["num_hidden_layers"], *heads, *sizes, paper_hours)


SHAPES = {"4b": _published("Qwen3-4B", paper_hours=2.95), "8b": _published("Qwen3-8B", paper_hours=3.77)}
# Every step of the benchmark in seconds, on a CPU.
TINY = {name: Shape(f"tiny ({name})", 64, 2, 4, 2, 16, 96, vocabulary=160_000) for name in SHAPES}


def tokenizer_of(folder: Path) -> str:
    """The folder's tokenizer as JSON, ending each text with EOS if it is a decoder's."""
    if (folder / CONFIG_FILE).is_file():
        return read_tokenizer(folder, Pooling.EOS, read_config(folder))
    return (folder / TOKENIZER_FILE).read_text(encoding="utf-8")


def load_texts(corpus: Path, count: int) -> list[str]:
    """Titles and texts of documents drawn at random, the same ones each time; again from the start if they are few."""
    content = corpus.read_bytes()
    lines = (gzip.decompress(content) if corpus.suffix == ".gz" else content).splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [f"{row.get('title') or ''}\n{row['text']}".strip() for row in rows]
    random.Random(SEED).shuffle(texts)
    return (texts * (count // len(texts) + 1))[:count]

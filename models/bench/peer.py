"""sentence-transformers around the very same model object, as its users would have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel, Qwen3Config

from models.bench.shapes import MAX_LENGTH
from models.encoder.spec import TOKENIZER_FILE

BATCH_SIZES = (32, 64, 128, 256)


class Peer:
    """`encode(texts, batch_size)` by sentence-transformers; attention and batch size are the caller's to choose."""

    def __init__(self, model: PreTrainedModel, tokenizer_json: str) -> None:
        from sentence_transformers import SentenceTransformer

        self._place = TemporaryDirectory(prefix="care-peer-")
        folder = Path(self._place.name)
        _write(folder, model, tokenizer_json)
        device = next(model.parameters()).device
        self._model = model
        self._sentence = SentenceTransformer(str(folder), device=str(device))
        first = self._sentence[0]
        # The folder holds a model of two rows; the one that is measured takes its place, under either name.
        setattr(first, "model" if "model" in first._modules else "auto_model", model)

    def attentions(self) -> list[str]:
        return ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") else [])]

    def use(self, attention: str) -> None:
        self._model.set_attn_implementation(attention)

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        return np.asarray(self._sentence.encode(texts, batch_size=batch_size, show_progress_bar=False))

    def best(self, texts: list[str], time: Callable[[Callable[[], object]], float]) -> tuple[str, int]:
        """The quickest attention and batch size that run here."""
        found: dict[tuple[str, int], float] = {}
        for attention in self.attentions():
            for size in BATCH_SIZES:
                try:
                    self.use(attention)
                    self.encode(texts[:size], size)
                    found[attention, size] = time(partial(self.encode, texts, size))
                except (torch.OutOfMemoryError, ImportError, ValueError, RuntimeError) as error:
                    print(f"  {attention}, batches of {size}: {str(error).splitlines()[0]}", flush=True)
                    continue
                rate = len(texts) / found[attention, size]
                print(f"  sentence-transformers, {attention}, batches of {size}: {rate:.1f} docs/s", flush=True)
        return min(found, key=lambda how: found[how])


@dataclass(frozen=True)
class PeerRun:
    """sentence-transformers as it is quickest."""

    peer: Peer
    attention: str
    batch_size: int

    def encode(self, texts: list[str]) -> np.ndarray:
        self.peer.use(self.attention)
        return self.peer.encode(texts, self.batch_size)


def _write(folder: Path, model: PreTrainedModel, tokenizer_json: str) -> None:
    """A sentence-transformers folder around a stand-in of the model, in the layout that hubs have."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = Qwen3Config(vocab_size=2, intermediate_size=32, head_dim=16, max_position_embeddings=MAX_LENGTH, **shape)
    AutoModel.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
    pad = json.loads(tokenizer_json)["added_tokens"][0]["content"]
    width = model.config.hidden_size
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad,
                                  "model_max_length": MAX_LENGTH},
        "sentence_bert_config.json": {"max_seq_length": MAX_LENGTH, "do_lower_case": False},
        "modules.json": [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"),
                                                  ("2_Normalize", "Normalize")])
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_cls_token": False,
                                  "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
    }  # fmt: skip
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")

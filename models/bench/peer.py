"""sentence-transformers around the very same model object, as its users would have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel, Qwen3Config

from models.bench.shapes import MAX_LENGTH
from models.encoder.spec import TOKENIZER_FILE

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
    """A transformers folder with the tokenizer and a model that loads at once."""
    config = Qwen3Config(
        vocab_size=2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, head_dim=16, max_position_embeddings=MAX_LENGTH,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
    pad = json.loads(tokenizer_json)["added_tokens"][0]["content"]
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "model_max_length": MAX_LENGTH}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")

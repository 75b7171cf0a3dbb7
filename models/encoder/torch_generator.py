"""Causal language model in torch: a generate stage tunes it and writes a folder that transformers can serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from models.encoder.folder import CONFIG_FILE, check_length, looks_back_only, read_config
from models.encoder.spec import share_weights
from models.encoder.tokenizer import Tokenizer
from models.encoder.torch import load_model
from models.errors import BadEncoder

MARK = "ANSWER"


class TorchGenerator(nn.Module):
    """A chat model with its head; `tokenizer` is transformers' own, which holds the chat template."""

    def __init__(self, backbone: PreTrainedModel, tokenizer: Any, max_length: int) -> None:  # noqa: ANN401 - transformers'
        super().__init__()
        self.backbone, self.tokenizer, self.max_length = backbone, tokenizer, max_length

    @classmethod
    def load(cls, folder: Path, max_length: int, *, dtype: torch.dtype = torch.float32) -> TorchGenerator:
        """Opens a transformers folder of a causal model with a chat template; in eval mode."""
        config = read_config(folder)
        require_generator(folder, config)
        check_length(folder, config, max_length)
        config.use_cache = True  # kept in the folder that `save` writes, for generation
        backbone = load_model(AutoModelForCausalLM, folder, config, dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not tokenizer.chat_template or not tokenizer.eos_token:
            raise BadEncoder(f"{folder}: no chat template or no end of turn; take an instruction-tuned checkpoint")
        return cls(backbone, tokenizer, max_length).eval()

    def chat(self, prompt: str) -> str:
        """Everything before the answer to a user's message, as servers of chat completions write it."""
        message = {"role": "user", "content": prompt}
        text: str = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return text

    @property
    def end(self) -> str:
        """Returns the token that ends an answer in the chat template; the tokenizer of a GGUF file may name another."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        before, _, after = str(self.tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(MARK)
        return after.strip() if before and after.strip() else str(self.tokenizer.eos_token)

    @property
    def plain_tokenizer(self) -> Tokenizer:
        """The tokenizer without the tokens that it adds to a text: `chat` and `end` hold them already."""
        values = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_json(json.dumps(values | {"post_processor": None}), self.max_length)

    def states(self, ids: Tensor) -> Tensor:
        """Last hidden states (texts, tokens, width) of ids that are padded on the right."""
        # No mask: causal attention never reaches the padding.
        adapted: Any = self.backbone
        plain = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
        found: Tensor = plain.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return found

    @property
    def vocabulary(self) -> Tensor:
        """The matrix (words, width) whose products with states are the scores of the next token."""
        return cast(Tensor, self.backbone.get_output_embeddings().weight)  # type: ignore[no-untyped-call]

    def save(self, folder: Path) -> None:
        """Writes a folder that `load`, transformers and servers of its models open."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder, save_original_format=False)
        self.tokenizer.save_pretrained(folder)
        share_weights(folder / CONFIG_FILE)


def require_generator(folder: Path, config: PretrainedConfig) -> None:
    """Refuses a model that does not write texts, or whose head is more than a matrix."""
    if not looks_back_only(config):
        raise BadEncoder(f"{folder}: a {config.model_type} does not write texts; take a causal language model")
    if getattr(config, "final_logit_softcapping", None):
        raise BadEncoder(f"{folder}: the scores of a {config.model_type} are capped, which is not supported here")

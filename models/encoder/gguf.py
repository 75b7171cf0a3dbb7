"""Converts a GGUF file (quantised weights, configuration, tokenizer) into a transformers folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from models.encoder.spec import TOKENIZER_FILE
from models.errors import BadEncoder

QWEN = ("qwen2", "qwen3")


def gguf_config(file: Path) -> PretrainedConfig:
    """Returns the shape of the model in the file; its weights are not read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        return config
    except (OSError, ValueError, KeyError) as error:
        raise BadEncoder(f"{file}: transformers cannot read it as GGUF: {error}") from error


def unpack_gguf(file: Path, folder: Path, *, writes: bool = False) -> Path:
    """Writes weights, configuration and tokenizer of the file into the folder, unless they are there already.

    A model that `writes` keeps its head and its chat template.
    """
    if folder.is_dir():
        return folder
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    named = {"gguf_file": file.name, "local_files_only": True}
    kind: Any = AutoModelForCausalLM if writes else AutoModel
    try:
        quantised = kind.from_pretrained(file.parent, dtype=torch.float32, **named)
        # By itself transformers takes every byte-level vocabulary for GPT-2's, which cuts words and numbers otherwise.
        reader: Any = Qwen2Tokenizer if quantised.config.model_type in QWEN else AutoTokenizer
        tokenizer = reader.from_pretrained(file.parent, **named)
    except (OSError, ValueError, KeyError) as error:
        raise BadEncoder(f"{file}: transformers cannot read it as GGUF: {error}") from error
    # What was read from GGUF cannot be saved; a plain model with the same weights can.
    plain = kind.from_config(quantised.config)
    plain.load_state_dict(quantised.state_dict())
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    plain.config.quantization_config = None
    plain.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh) if writes else tokenizer.backend_tokenizer.save(str(fresh / TOKENIZER_FILE))
    os.replace(fresh, folder)
    return folder

"""Shapes of published backbones, for plans and measurements where the weights are not at hand. Written from the
checkpoints' public configurations; a folder's own configuration comes first wherever there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from models.training import gguf
from models.transformers_folder import CONFIG_FILE, read_config


def _decoder(kind: str, width: int, inner: int, layers: int, heads: tuple[int, int, int], words: int) -> dict[str, Any]:
    attention = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    return {"model_type": kind, **shape, **attention}


def _encoder(kind: str, width: int, layers: int, words: int, positions: int = 512) -> dict[str, Any]:
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": words}
    return {"model_type": kind, **shape, "num_attention_heads": width // 64, "max_position_embeddings": positions}


SHAPES: dict[str, dict[str, Any]] = {
    "gte-multilingual-base": _encoder("gte", 768, 12, 250048, 8192),
    "bge-small-zh-v1.5": _encoder("bert", 512, 4, 21128),
    "bge-large-zh-v1.5": _encoder("bert", 1024, 24, 21128),
    "e5-base": _encoder("bert", 768, 12, 30522),
    "gemma-2b": _decoder("gemma", 2048, 16384, 18, (8, 1, 256), 256000),
    "qwen2.5-coder-0.5b": _decoder("qwen2", 896, 4864, 24, (14, 2, 64), 151936),
    "qwen3-4b": _decoder("qwen3", 2560, 9728, 36, (32, 8, 128), 151936),
    "qwen3-8b": _decoder("qwen3", 4096, 12288, 36, (32, 8, 128), 151936),
    "qwen3-embedding-8b": _decoder("qwen3", 4096, 12288, 36, (32, 8, 128), 151936),
}


def config_of(start: Path) -> PretrainedConfig | None:
    """The start's own configuration, or else the published one of the model that it is named after."""
    if (start / CONFIG_FILE).is_file():
        return read_config(start)
    if start.suffix == ".gguf" and start.is_file():
        return gguf.config_of(start)
    name = start.name.lower()
    known = next((shape for key, shape in SHAPES.items() if name == key or name.startswith(f"{key}-")), None)
    return None if known is None else made(known)


def made(shape: dict[str, Any]) -> PretrainedConfig:
    """A configuration of this shape."""
    values = {key: value for key, value in shape.items() if key != "model_type"}
    return AutoConfig.for_model(shape["model_type"], use_cache=False, **values)

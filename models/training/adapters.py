"""What is trained of an encoder: low-rank adapters on a frozen base, or all weights; put aside, put back, written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from models.encoder.spec import sha256_of, share_weights
from models.encoder.torch import BASE_FILE, PROJECTION_FILE, TorchEncoder
from models.encoder.torch_generator import TorchGenerator
from models.errors import BadEncoder
from models.training.recipe import Lora

Adaptable = TorchEncoder | TorchGenerator


def add_adapters(encoder: Adaptable, lora: Lora) -> None:
    """Adds low-rank adapters to the backbone; only they require gradients, in float32."""
    from peft import LoraConfig, get_peft_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout)
    try:
        encoder.backbone = get_peft_model(encoder.backbone, config)  # type: ignore[assignment]
    except ValueError as error:
        there = {n.rpartition(".")[2] for n, m in encoder.backbone.named_modules() if isinstance(m, nn.Linear)}
        known = ", ".join(sorted(there))
        raise BadEncoder(f"lora.targets: {targets} are not layers of the backbone; it has {known}") from error


def save_adapter(encoder: Adaptable, folder: Path, base: Mapping[str, object]) -> None:
    """Writes the adapters as peft does; for care encoder import also the projection and how an encoder is used.

    `base` is the name of the weights that the adapters were trained on, their digest and their number of layers.
    """
    encoder.backbone.save_pretrained(folder)
    path = folder / "adapter_config.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    # peft writes where the start lay: a path of this machine.
    path.write_text(json.dumps(facts | {"base_model_name_or_path": None}, indent=2), encoding="utf-8")
    if isinstance(encoder, TorchGenerator):
        share_weights(path)
        return
    if encoder.projection is not None:
        encoder.projection.save(folder / PROJECTION_FILE)
    (folder / BASE_FILE).write_text(json.dumps(base, indent=2), encoding="utf-8")
    checksums = {
        file.name: sha256_of(file) for file in (path, folder / BASE_FILE, *sorted(folder.glob("*.safetensors")))
    }
    encoder.spec.model_copy(update={"checksums": checksums}).save(folder)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}


@torch.no_grad()
def restore_trained(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights back by name; every one must have a place."""
    own = dict(module.named_parameters())
    for name, value in weights.items():
        own[name].copy_(value)


@torch.no_grad()
def blend(encoder: nn.Module, start: Mapping[str, Tensor], share: float) -> None:
    """Sets trained weights to share · trained + (1 - share) · start."""
    for name, value in encoder.named_parameters():
        if name in start:
            value.lerp_(start[name].to(value), 1 - share)

"""Reads the shapes of backbones and checks that a recipe fits them. Needs configurations, not weights.

shapes.toml has the public configurations of published checkpoints. A folder's own configuration comes first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

from models.encoder.folder import CONFIG_FILE, DEFAULT_MAX_LENGTH, check_length, infer_spec, read_config
from models.encoder.gguf import gguf_config
from models.encoder.spec import INSTRUCTION, SPEC_FILE, TEMPLATE, Pooling
from models.encoder.tokenizer import Tokenizer
from models.encoder.torch import PROJECTION_FILE, Projection
from models.encoder.torch_generator import require_generator
from models.encoder.torch_reranker import require_architecture
from models.errors import BadData, BadEncoder
from models.evaluation.benchmarks import wording
from models.rows import count_units
from models.training.recipe import Encoder, Fresh, Recipe
from models.training.stages import AnyStage, Contrast, Generate, Reconstruct, Rerank, encoders_of

SHAPES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def config_of(start: Path) -> PretrainedConfig | None:
    """Returns the start's own configuration, or else the published one of the model that it is named after."""
    if (start / CONFIG_FILE).is_file():
        return read_config(start)
    if start.suffix == ".gguf" and start.is_file():
        return gguf_config(start)
    name = start.name.lower()
    known = next((shape for key, shape in SHAPES.items() if name == key or name.startswith(f"{key}-")), None)
    return None if known is None else made(known)


def made(shape: dict[str, Any]) -> PretrainedConfig:
    """Returns a configuration of this shape."""
    values = {key: value for key, value in shape.items() if key != "model_type"}
    return AutoConfig.for_model(shape["model_type"], use_cache=False, **values)


def fresh_config(fresh: Fresh) -> PretrainedConfig:
    if not fresh.tokenizer.is_file():
        raise BadEncoder(f"fresh.tokenizer: {fresh.tokenizer} is not there; call care from the repository's root")
    words = Tokenizer.load(fresh.tokenizer, DEFAULT_MAX_LENGTH).vocabulary_size
    size = {"hidden_size": fresh.width, "intermediate_size": 4 * fresh.width, "num_attention_heads": fresh.width // 64}
    return made({"model_type": "bert", **size, "num_hidden_layers": fresh.layers, "vocab_size": words})


def shape_of(recipe: Recipe, name: str) -> PretrainedConfig | None:
    """Returns the configuration of an encoder as the recipe uses it, with its layers cut; None if unknown."""
    config = recipe.encoders[name]
    origin = recipe.encoders[config.copy_of] if config.copy_of else config
    shape = fresh_config(origin.fresh) if origin.fresh else config_of(Path(str(origin.start)))
    cut = origin.layers if recipe.copies_trained(name) else None
    for layers, what in ((cut, origin.start), (config.layers, config.copy_of or config.start)):
        if shape is None or layers is None:
            continue
        if layers > shape.num_hidden_layers:
            raise BadEncoder(f"encoders.{name}.layers: {what} has {shape.num_hidden_layers}, not {layers}")
        shape.num_hidden_layers = layers
        if getattr(shape, "layer_types", None):
            shape.layer_types = shape.layer_types[:layers]
    return shape


def bare_model(shape: PretrainedConfig, where: str) -> nn.Module:
    """Returns a backbone of this shape without weights; errors name the part of the recipe that has it."""
    try:
        with torch.device("meta"):
            backbone: nn.Module = AutoModel.from_config(shape)  # type: ignore[no-untyped-call]
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise BadEncoder(f"{where}: {CONFIG_FILE} does not describe a {shape.model_type}: {error!r}") from error
    return backbone


def check(recipe: Recipe) -> None:
    """Refuses a recipe whose parts do not fit, at its true sizes: dimensions, lengths, pooling, prompts, losses.

    Encoders whose shape is not known are passed over.
    """
    shapes = {name: shape_of(recipe, name) for name in recipe.encoders}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    stages = {name: stage for name, stage in recipe.stages.items() if not stage.skip}
    for name in dict.fromkeys(name for stage in stages.values() for name in encoders_of(stage)):
        if name in known:
            _check_encoder(recipe, name, known[name])
    for name, stage in stages.items():
        _check_stage(recipe, f"stages.{name}", stage, known)
    for name in recipe.folded:
        if name in known:
            _check_folded(recipe, name, known[name])


def _check_encoder(recipe: Recipe, name: str, shape: PretrainedConfig) -> None:
    config, where, place = recipe.encoders[name], f"encoders.{name}", Path(str(recipe.encoders[name].start or name))
    check_length(place, shape, config.max_length)
    if name in recipe.rerankers:
        require_architecture(place, shape)
        return
    if name in recipe.generators:
        require_generator(place, shape)
        _check_targets(where, config, shape)
        return
    width, dim = config.projection or shape.hidden_size, recipe.part_of(name)
    if dim > width:
        raise BadEncoder(f"{where}: it has {width} dimensions, the recipe {dim}; set {where}.dim to at most {width}")
    if config.pooling is None and (place / CONFIG_FILE).is_file() and not (place / SPEC_FILE).is_file():
        infer_spec(place, space=recipe.space)  # raises if no file says how the checkpoint is pooled
    if config.pooling is Pooling.CLS and is_decoder(shape):
        raise BadEncoder(f"{where}.pooling: the first token of a {shape.model_type} sees no other; use eos or mean")
    longest = max(map(count_units, _prompts(config)))
    if longest >= config.max_length // 2:
        raise BadEncoder(f"{where}: an instruction of about {longest} tokens leaves little of {config.max_length}")
    _check_targets(where, config, shape)


def _check_folded(recipe: Recipe, name: str, shape: PretrainedConfig) -> None:
    """Refuses what a query encoder with joined documents cannot be written in: more dimensions than its vectors have
    directions, and vectors that are no linear map of its features.
    """
    start = Path(str(recipe.encoders[name].start)) / PROJECTION_FILE
    if start.is_file() and ((projection := Projection.load(start, torch.float32)).tanh or projection.bias is not None):
        raise BadEncoder(
            f"{start} has a bias or tanh, which a pair with joined documents cannot have; remove it there to begin a "
            "new one"
        )
    most = min(recipe.dim_of(name), shape.hidden_size + recipe.encoders[name].hidden)
    if recipe.dim > most:
        there = f"encoders.{name}: with joined documents it has at most {most} dimensions, the recipe {recipe.dim}"
        raise BadEncoder(f"{there}; set the recipe's dim to at most {most}")


def _check_targets(where: str, config: Encoder, shape: PretrainedConfig) -> None:
    if config.lora is not None and not isinstance(config.lora.targets, str):
        linear = {n.rpartition(".")[2] for n, m in bare_model(shape, where).named_modules() if isinstance(m, nn.Linear)}
        if others := set(config.lora.targets) - linear:
            there = ", ".join(sorted(linear))
            raise BadEncoder(f"{where}.lora.targets: {others.pop()!r} is not a layer of the backbone; it has {there}")


def _prompts(config: Encoder) -> list[str]:
    template = config.query_template or TEMPLATE
    if INSTRUCTION not in template:
        raise BadData(f"query_template {template!r} must hold {INSTRUCTION}")
    asked = template.replace(INSTRUCTION, wording(config.instruction)) if config.instruction else ""
    return [asked, config.query_instruction or "", config.document_instruction or ""]


def is_decoder(shape: PretrainedConfig) -> bool:
    return hasattr(shape, "num_key_value_heads") or shape.model_type == "gpt_neox"


def _check_stage(recipe: Recipe, where: str, stage: AnyStage, shapes: dict[str, PretrainedConfig]) -> None:
    if isinstance(stage, Reconstruct):
        if stage.encoder in shapes and is_decoder(shapes[stage.encoder]):
            kind = shapes[stage.encoder].model_type
            raise BadEncoder(f"{where}: RetroMAE needs an encoder with a mask token, and a {kind} has none")
        return
    if isinstance(stage, Rerank | Generate):
        return
    sides = [stage.query, *([stage.document] if stage.document else [])]
    if not isinstance(stage, Contrast):
        dims = {name: recipe.dim_of(name) for name in sides}
        if len(set(dims.values())) > 1:
            raise BadData(f"{where}: {dims} dimensions cannot be compared; give the encoders one dim")
        return
    teacher = stage.loss.teacher if stage.loss.needs_targets else None
    readers = [*sides, *([teacher] if teacher not in (None, "start") else [])]
    wanted, whose = _compared_dim(recipe, stage, readers)
    for name in readers:
        if (dim := recipe.dim_of(name)) != wanted:
            raise BadData(f"{where}: encoders.{name}.dim is {dim}; a contrast stage needs {whose} {wanted}")
    widths = [
        (recipe.encoders[name].projection or shapes[name].hidden_size) if name in stage.train else recipe.dim_of(name)
        for name in sides
        if name in shapes
    ]
    for dim in stage.loss.dims:
        if widths and dim > min(widths):
            raise BadData(f"loss.dims: {dim} is more than the {min(widths)} dimensions that both sides have")


def _compared_dim(recipe: Recipe, stage: Contrast, readers: Sequence[str]) -> tuple[int, str]:
    """Returns in how many dimensions a stage compares its readers' vectors, and whose these are."""
    joined = [name for name in readers if recipe.encoders[name].beside is not None]
    if joined:
        return recipe.dim_of(joined[0]), "the joined encoders'"
    if recipe.folded:  # the recipe's dim is that of the pair as it is written at the end of the run
        return recipe.dim_of(stage.query), f"encoders.{stage.query}'s"
    return recipe.dim, "the recipe's"

"""Exports a source folder to an encoder folder with ONNX graphs: export, variants, parity check, one final move.

backbone graph (Optimum | torch | given) ── head ──────────────→ model.onnx
               ├── fusions, fp16 (Optimum | ONNX Runtime) ─ head → model.fp16.onnx
               └── head ── slimming, smoothing, int8 (Optimum | ONNX Runtime) → model.int8.onnx

Above 2 GiB `large` traces and writes each graph by itself, with its weights in a file beside it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import ModelProto
from pydantic import ValidationError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from models.encoder.folder import check_length, infer_spec, read_config, read_tokenizer
from models.encoder.pairs import RerankerSpec
from models.encoder.spec import (
    DATA_SUFFIX,
    SPEC_FILE,
    TOKENIZER_FILE,
    EncoderSpec,
    Parity,
    Pooling,
    Variant,
    fault,
    name_of_weights,
    sha256_of,
)
from models.encoder.staging import staging
from models.encoder.tokenizer import Tokenizer, Tokens, pad
from models.encoder.torch import TorchEncoder, embed, not_finite, weight_files
from models.errors import ExportError
from models.export import backbone
from models.export.backbone import HIDDEN_NAMES, IDS, MASK, POSITIONS, TYPES
from models.export.folders import WEIGHTS, check_source, check_target, graphs, has_weights
from models.export.fusions import fuse, quiet, slim
from models.export.int8 import calibration_samples, prepare, quantize
from models.export.large import write_large
from models.export.parity import AT_ONCE, CHECK_TEXTS, FLOORS, Floor, Vectors, check_parity

GRAPH = "model.onnx"
# Files of a target that an export replaces; anything else there (a model card) stays.
OWNED = ("*.onnx", f"*.onnx{DATA_SUFFIX}", "*.json")
# fp16 comes last: it halves the weights of a large encoder in place.
LARGE_ORDER = (Variant.FP32, Variant.INT8, Variant.FP16)


class Backend(StrEnum):
    """The exporter: Optimum if it is installed and takes the architecture, else torch; or the given one."""

    AUTO = "auto"
    TORCH = "torch"
    OPTIMUM = "optimum"


Spec = TypeVar("Spec", EncoderSpec, RerankerSpec)


@dataclass(frozen=True, slots=True)
class Graph:
    """One exported graph: its size, how close it is to its reference, and the tools that made it."""

    variant: Variant
    size_bytes: int
    parity: Any
    made_by: str


@dataclass(frozen=True, slots=True)
class ExportReport(Generic[Spec]):
    """Folder, spec and graphs that an export wrote."""

    folder: Path
    spec: Spec
    graphs: tuple[Graph, ...]


def export(
    source: Path, target: Path, *, space: str | None = None, pooling: Pooling | None = None, dim: int | None = None,
    max_length: int | None = None, variants: Sequence[Variant] = tuple(Variant), backend: Backend = Backend.AUTO,
    optimum_python: Path | None = None, floors: Mapping[Variant, Floor] = FLOORS,
) -> ExportReport[EncoderSpec]:  # fmt: skip
    """Writes `target` whole or not at all; raises ParityError when a graph stays below its floor."""
    check_target(source, target)
    if pooling is not None and space is None and (source / SPEC_FILE).is_file():
        own = EncoderSpec.load(source)
        if own.pooling != pooling:
            raise ExportError(
                f"{source} is pooled by {own.pooling}: vectors pooled by {pooling} need a --space of their own"
            )
    opened = open_source(source, {"space": space, "pooling": pooling, "dim": dim, "max_length": max_length})
    spec, origin, config = opened.spec, opened.origin, opened.config
    optimum = _choose(backend, opened, optimum_python)
    projection = origin.projection if isinstance(origin, TorchEncoder) else None
    maker = Maker(
        origin.backbone if isinstance(origin, TorchEncoder) else origin,
        config,
        partial(backbone.append_head, spec=spec, projection=projection),
        lambda: calibration_samples(opened.tokenizer(), config.vocab_size),
        is_large=opened.is_large,
        optimum=optimum,
    )
    reference = opened.reference(CHECK_TEXTS)
    if not (np.isfinite(reference).all() and reference.any(axis=1).all()):
        raise ExportError(
            f"{source}: gives vectors that are zero or not finite; train it again with a lower learning rate"
        )

    def check(folder: Path, variant: Variant) -> Parity:
        return check_parity(folder, variant, reference, floors[variant])

    return write_folder(target, spec, opened.tokenizer_json, variants, maker, check)


def write_folder(
    target: Path, spec: Spec, tokenizer_json: str, variants: Sequence[Variant], maker: Maker,
    check: Callable[[Path, Variant], Any],
) -> ExportReport[Spec]:  # fmt: skip
    """Writes the graphs, and the spec with their checksums and what `check` measured of each, or nothing at all."""
    variants = tuple(dict.fromkeys(variants))
    with staging(target) as work:
        staged = work / "staged"
        staged.mkdir()
        (staged / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
        order = sorted(variants, key=LARGE_ORDER.index) if maker.is_large else variants
        made_by = {variant: maker.make(variant, staged / variant.filename, work) for variant in order}
        files: dict[Variant, list[Path]] = {variant: _files(staged, variant) for variant in variants}
        names = [TOKENIZER_FILE, *(path.name for paths in files.values() for path in paths)]
        spec = spec.model_copy(update={"checksums": {name: sha256_of(staged / name) for name in names}})
        spec.save(staged)
        spec = spec.model_copy(update={"parity": {variant: check(staged, variant) for variant in variants}})
        spec.save(staged)
        graphs = tuple(
            Graph(variant, sum(path.stat().st_size for path in paths), spec.parity[variant], made_by[variant])
            for variant, paths in files.items()
        )
        _replace_target(staged, target, work)
    return ExportReport(target, spec, graphs)


def _choose(backend: Backend, source: Source, given: Path | None) -> Path | None:
    """Returns the Optimum interpreter to use, or None for torch and ONNX Runtime."""
    if backend is Backend.TORCH:
        return None
    if source.is_large:
        if backend is Backend.OPTIMUM:
            raise ExportError("an encoder above 2 GiB is exported by torch: leave --backend out")
        return None
    # Without layers nothing but the pooling reads the mask, and Optimum's graph would not take it.
    taken = source.config.model_type in backbone.EXPORTS and source.config.num_hidden_layers > 0
    python = backbone.find_python(given)
    if backend is Backend.OPTIMUM and not taken:
        raise ExportError(f"Optimum does not take {source.config.model_type}: use backend torch")
    if backend is Backend.OPTIMUM and python is None:
        raise ExportError(f"there is no Optimum environment: {backbone.HOW_TO}")
    return python if taken else None


class Maker:
    """Makes the graphs of one encoder or reranker; the backbone is exported once, when the first graph needs it.

    `origin` is the backbone, or the path of its graph. `append` makes the whole function of the backbone's graph;
    `samples` are what the ranges of activations are measured on.
    """

    def __init__(
        self, origin: PreTrainedModel | Path, config: PretrainedConfig, append: Callable[[ModelProto], None],
        samples: Callable[[], list[Tokens]], *, is_large: bool, optimum: Path | None = None,
    ) -> None:  # fmt: skip
        self._origin, self._config, self._append, self._samples = origin, config, append, samples
        self.is_large, self._optimum = is_large, optimum

    def make(self, variant: Variant, path: Path, work: Path) -> str:
        """Writes one graph and returns the names of the tools that made it."""
        if self.is_large and not isinstance(self._origin, Path):
            write_large(self._origin, self._append, variant, path)
            return "torch"
        graph, exporter = self._backbone(work)
        model, by = self._fuse(graph, work) if variant is Variant.FP16 else (onnx.load(graph), exporter)
        self._append(model)
        if variant is Variant.INT8:
            by = self._quantize(model, path, work)
        else:
            onnx.save(model, path)
        return exporter if by == exporter else f"{exporter}, {by}"

    def _backbone(self, work: Path) -> tuple[Path, str]:
        if isinstance(self._origin, Path):
            return self._origin, "given"
        graph = work / "backbone" / GRAPH
        if self._optimum is None:
            if not graph.is_file():
                graph.parent.mkdir()
                backbone.export_backbone(self._origin, graph)
            return graph, "torch"
        if not graph.is_file():
            backbone.write_backbone(self._origin, work / "weights")
            backbone.run_worker(self._optimum, "export", work / "weights", graph.parent)
        return graph, "optimum"

    def _fuse(self, graph: Path, work: Path) -> tuple[ModelProto, str]:
        if self._optimum is None or self._config.model_type not in backbone.OPTIMIZES:
            return fuse(graph, self._config), "onnxruntime"
        folder = work / "to-fuse"
        folder.mkdir()
        backbone.write_graph_config(self._config, folder)
        shutil.copyfile(graph, folder / GRAPH)
        backbone.run_worker(self._optimum, "optimize", folder, work / "fused")
        return onnx.load(work / "fused" / GRAPH), "optimum"

    def _quantize(self, whole: ModelProto, path: Path, work: Path) -> str:
        folder = work / "to-quantize"
        folder.mkdir()
        with quiet():
            slim(whole, self._config)
        prepare(whole, self._samples())
        onnx.save(whole, folder / GRAPH)
        if self._optimum is None:
            quantize(folder / GRAPH, path)
            return "onnxruntime"
        backbone.write_graph_config(self._config, folder)
        backbone.run_worker(self._optimum, "quantize", folder, work / "quantized")
        shutil.move(work / "quantized" / GRAPH, path)
        return "optimum"


def _files(folder: Path, variant: Variant) -> list[Path]:
    """Returns the graph, and the file with its weights if it has one."""
    data = folder / (variant.filename + DATA_SUFFIX)
    return [folder / variant.filename, *([data] if data.is_file() else [])]


def _replace_target(staged: Path, target: Path, work: Path) -> None:
    """Puts the staged folder in the target's place by renames; what no export owns comes along."""
    if target.exists():
        for path in target.iterdir():
            if path.is_dir():
                shutil.copytree(path, staged / path.name)
            elif not any(path.match(pattern) for pattern in OWNED):
                shutil.copy2(path, staged / path.name)
        target.rename(work / "replaced")
    try:
        staged.rename(target)
    except OSError:
        if (work / "replaced").exists():
            (work / "replaced").rename(target)
        raise


# A protobuf file ends at 2 GiB; some of it is not weights. Beyond it the weights lie in a file beside the graph.
LARGEST_BYTES = 2**31 - 2**24


@dataclass(frozen=True, slots=True)
class Source:
    """An opened source; `origin` is the encoder in torch, or the path of an exported backbone graph."""

    spec: EncoderSpec
    config: PretrainedConfig
    tokenizer_json: str
    origin: TorchEncoder | Path

    @property
    def is_large(self) -> bool:
        return isinstance(self.origin, TorchEncoder) and is_large(self.origin)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_json(self.tokenizer_json, self.spec.max_length)

    def reference(self, texts: Sequence[str]) -> Vectors:
        """Returns the vectors (texts, dim) to compare with: torch's, or the given graph's with torch's head."""
        if isinstance(self.origin, TorchEncoder):
            return self.origin.encode(texts, self.spec.sides[0], AT_ONCE)
        return _graph_vectors(self, self.origin, texts)


def is_large(model: nn.Module) -> bool:
    """Returns whether the weights do not fit one ONNX file in fp32."""
    return 4 * sum(parameter.numel() for parameter in model.parameters()) > LARGEST_BYTES


def open_source(folder: Path, overrides: Mapping[str, Any]) -> Source:
    """Opens an encoder folder, a transformers folder or an ONNX folder; `overrides` are fields of the spec."""
    check_source(folder)
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if has_weights(folder):
        spec = _spec(folder, overrides)
        encoder = TorchEncoder.load(folder, spec)
        require_finite(folder, encoder)
        spec = spec.model_copy(update={"weights": weights_name(folder)})
        return Source(spec, encoder.backbone.config, encoder.tokenizer_json, encoder)
    if (folder / SPEC_FILE).is_file():
        raise ExportError(f"{folder} was exported already: give the folder with its weights")
    spec, config, graph = _spec(folder, overrides), read_config(folder), graphs(folder)[0]
    check_length(folder, config, spec.max_length)
    if (size := sum(path.stat().st_size for path in graph.parent.glob("*.onnx*"))) > LARGEST_BYTES:
        raise ExportError(f"{folder}: a graph of {size / 2**30:.1f} GiB is not read; give the folder with its weights")
    return Source(spec, config, read_tokenizer(folder, spec.pooling, config), graph)


def require_finite(folder: Path, model: nn.Module) -> None:
    if (name := not_finite(model)) is not None:
        raise ExportError(f"{folder}: the weight {name} is not finite; train it again, or fetch the folder again")


def weights_name(folder: Path) -> str:
    """As the spec of an encoder folder names its own (`EncoderSpec.identities`)."""
    names = {*weight_files(folder), *(path.name for path in folder.glob(WEIGHTS[1]))}
    return name_of_weights({name: sha256_of(folder / name) for name in names})


def _spec(folder: Path, overrides: Mapping[str, Any]) -> EncoderSpec:
    if not (folder / SPEC_FILE).is_file():
        if "space" not in overrides:
            raise ExportError(f"{folder} does not name its embedding space: give one (--space)")
        return infer_spec(folder, **overrides)
    spec = EncoderSpec.load(folder)
    try:
        return EncoderSpec.model_validate(spec.model_dump() | dict(overrides))
    except ValidationError as error:
        raise ExportError(f"{folder}: {fault(error)}") from error


def _graph_vectors(source: Source, graph: Path, texts: Sequence[str]) -> Vectors:
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    hidden = next(output.name for output in session.get_outputs() if output.name in HIDDEN_NAMES)
    rows = []
    for tokens in source.tokenizer().batch([source.spec.instruction(source.spec.sides[0]) + text for text in texts]):
        ids, mask = pad([tokens])
        feeds = {IDS: ids, MASK: mask, TYPES: np.zeros_like(ids), POSITIONS: np.arange(len(tokens))[None]}
        (states,) = session.run([hidden], {value.name: feeds[value.name] for value in session.get_inputs()})
        rows.append(embed(torch.from_numpy(states), torch.from_numpy(mask), source.spec).numpy())
    return np.concatenate(rows)

"""From a source folder to an encoder folder with its ONNX graphs: export, variants, parity, and one move at the end.

backbone graph (Optimum | torch | given) ── head ──────────────→ model.onnx
               ├── fusions, fp16 (Optimum | ONNX Runtime) ─ head → model.fp16.onnx
               └── head ── slimming, smoothing, int8 (Optimum | ONNX Runtime) → model.int8.onnx

Above 2 GiB `large` traces and writes each graph by itself, with its weights in a file beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import ModelProto
from pydantic import ValidationError
from transformers import PretrainedConfig

from models.encoder.folder import check_length, infer_spec, read_config, read_tokenizer
from models.encoder.spec import (
    DATA_SUFFIX,
    RERANKER_FILE,
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
from models.encoder.tokenizer import Tokenizer, pad
from models.encoder.torch import Projection, TorchEncoder, embed, weight_files
from models.errors import ExportError
from models.export import backbone
from models.export.backbone import HIDDEN_NAMES, IDS, MASK, POSITIONS, TYPES
from models.export.large import write_large
from models.export.parity import AT_ONCE, CHECK_TEXTS, FLOORS, Floor, Vectors, check_parity
from models.export.variants import calibration_samples, fuse, prepare, quantize, quiet, slim

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


@dataclass(frozen=True, slots=True)
class Graph:
    """One exported graph: its size, how close it is to its reference, and the tools that made it."""

    variant: Variant
    size_bytes: int
    parity: Parity
    made_by: str


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written where."""

    folder: Path
    spec: EncoderSpec
    graphs: tuple[Graph, ...]


def export(
    source: Path, target: Path, *, space: str | None = None, pooling: Pooling | None = None, dim: int | None = None,
    max_length: int | None = None, variants: Sequence[Variant] = tuple(Variant), backend: Backend = Backend.AUTO,
    optimum_python: Path | None = None, floors: Mapping[Variant, Floor] = FLOORS,
) -> ExportReport:  # fmt: skip
    """Writes `target` whole or not at all; raises ParityError when a graph stays below its floor."""
    check_target(source, target)
    variants = tuple(dict.fromkeys(variants))
    opened = open_source(source, {"space": space, "pooling": pooling, "dim": dim, "max_length": max_length})
    maker = _Maker(opened, _choose(backend, opened, optimum_python))
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the target's file system, so that a rename puts the folder in place.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        work, staged = Path(folder), Path(folder, "encoder")
        staged.mkdir()
        (staged / TOKENIZER_FILE).write_text(opened.tokenizer_json, encoding="utf-8")
        reference = opened.reference(CHECK_TEXTS)
        order = sorted(variants, key=LARGE_ORDER.index) if opened.is_large else variants
        made_by = {variant: maker.make(variant, staged / variant.filename, work) for variant in order}
        spec = _checked(staged, opened.spec, reference, variants, floors)
        graphs = tuple(
            Graph(variant, size_of(staged, variant), spec.parity[variant], made_by[variant]) for variant in variants
        )
        replace_target(staged, target, work)
    return ExportReport(target, spec, graphs)


def _choose(backend: Backend, source: Source, given: Path | None) -> Path | None:
    """The Optimum interpreter to use, or None for torch and ONNX Runtime."""
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


class _Maker:
    """Makes the graphs of one source; the backbone is exported once, when the first graph needs it."""

    def __init__(self, source: Source, optimum: Path | None) -> None:
        self._source = source
        self._optimum = optimum

    def make(self, variant: Variant, path: Path, work: Path) -> str:
        """Writes one graph and returns the names of the tools that made it."""
        if isinstance(encoder := self._source.origin, TorchEncoder) and self._source.is_large:
            append = partial(backbone.append_head, spec=encoder.spec, projection=encoder.projection)
            write_large(encoder.backbone, append, variant, path)
            return "torch"
        graph, exporter = self._backbone(work)
        model, by = self._fuse(graph, work) if variant is Variant.FP16 else (onnx.load(graph), exporter)
        backbone.append_head(model, self._source.spec, self._source.projection())
        if variant is Variant.INT8:
            by = self._quantize(model, path, work)
        else:
            onnx.save(model, path)
        return exporter if by == exporter else f"{exporter}, {by}"

    def _backbone(self, work: Path) -> tuple[Path, str]:
        origin = self._source.origin
        if isinstance(origin, Path):
            return origin, "given"
        graph = work / "backbone" / GRAPH
        if self._optimum is None:
            if not graph.is_file():
                graph.parent.mkdir()
                backbone.export_backbone(origin.backbone, graph)
            return graph, "torch"
        if not graph.is_file():
            backbone.write_backbone(origin.backbone, work / "weights")
            backbone.run_worker(self._optimum, "export", work / "weights", graph.parent)
        return graph, "optimum"

    def _fuse(self, graph: Path, work: Path) -> tuple[ModelProto, str]:
        if self._optimum is None or self._source.config.model_type not in backbone.OPTIMIZES:
            return fuse(graph, self._source.config), "onnxruntime"
        folder = work / "to-fuse"
        folder.mkdir()
        backbone.write_graph_config(self._source.config, folder)
        shutil.copyfile(graph, folder / GRAPH)
        backbone.run_worker(self._optimum, "optimize", folder, work / "fused")
        return onnx.load(work / "fused" / GRAPH), "optimum"

    def _quantize(self, whole: ModelProto, path: Path, work: Path) -> str:
        source, folder = self._source, work / "to-quantize"
        folder.mkdir()
        with quiet():
            slim(whole, source.config)
        samples = calibration_samples(source.tokenizer(), source.config.vocab_size)
        prepare(whole, samples)
        onnx.save(whole, folder / GRAPH)
        if self._optimum is None:
            quantize(folder / GRAPH, path)
            return "onnxruntime"
        backbone.write_graph_config(source.config, folder)
        backbone.run_worker(self._optimum, "quantize", folder, work / "quantized")
        shutil.move(work / "quantized" / GRAPH, path)
        return "optimum"


def _checked(
    folder: Path, spec: EncoderSpec, reference: Vectors, variants: Sequence[Variant], floors: Mapping[Variant, Floor]
) -> EncoderSpec:
    """Writes `encoder.json` with checksums, measures each graph, and writes it again with what was measured."""
    spec = spec.model_copy(update={"checksums": checksums_of(folder, variants)})
    spec.save(folder)
    parity = {variant: check_parity(folder, variant, reference, floors[variant]) for variant in variants}
    spec = spec.model_copy(update={"parity": parity})
    spec.save(folder)
    return spec


def checksums_of(folder: Path, variants: Sequence[Variant]) -> dict[str, str]:
    """Those of the tokenizer and of every file of these graphs."""
    names = [TOKENIZER_FILE, *(path.name for variant in variants for path in _files(folder, variant))]
    return {name: sha256_of(folder / name) for name in names}


def _files(folder: Path, variant: Variant) -> list[Path]:
    """The graph, and the file with its weights if it has one."""
    data = folder / (variant.filename + DATA_SUFFIX)
    return [folder / variant.filename, *([data] if data.is_file() else [])]


def size_of(folder: Path, variant: Variant) -> int:
    return sum(path.stat().st_size for path in _files(folder, variant))


def check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise ExportError(f"{target} is the source itself: give another target")
    if target.exists() and not (target.is_dir() and (_is_described(target) or not any(target.iterdir()))):
        raise ExportError(f"{target} is there and is not an encoder folder: give another target")
    if has_weights(target):
        raise ExportError(f"{target} holds a trained encoder, which an export would replace: give another target")


def _is_described(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SPEC_FILE, RERANKER_FILE))


def replace_target(staged: Path, target: Path, work: Path) -> None:
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


WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
GRAPHS = ("model.onnx", "onnx/model.onnx")
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
        """Whether the weights do not fit one ONNX file in fp32."""
        if isinstance(self.origin, Path):
            return False
        return 4 * sum(parameter.numel() for parameter in self.origin.parameters()) > LARGEST_BYTES

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_json(self.tokenizer_json, self.spec.max_length)

    def projection(self) -> Projection | None:
        """The dense layer on top of the backbone, if the encoder has one."""
        return self.origin.projection if isinstance(self.origin, TorchEncoder) else None

    def reference(self, texts: Sequence[str]) -> Vectors:
        """The vectors (texts, dim) that an exported graph must give: torch's, or the given graph with torch's head."""
        if isinstance(self.origin, TorchEncoder):
            return self.origin.encode(texts, self.spec.sides[0], AT_ONCE)
        return _graph_vectors(self, self.origin, texts)


def open_source(folder: Path, overrides: Mapping[str, Any]) -> Source:
    """Opens an encoder folder, a transformers folder or an ONNX folder; `overrides` are fields of the spec."""
    if not folder.is_dir():
        raise ExportError(f"{folder} is not a folder")
    given = {name: value for name, value in overrides.items() if value is not None}
    graph = next((folder / name for name in GRAPHS if (folder / name).is_file()), None)
    if has_weights(folder):
        spec = _spec(folder, given)
        encoder = TorchEncoder.load(folder, spec)
        spec = spec.model_copy(update={"weights": weights_name(folder)})
        return Source(spec, encoder.backbone.config, encoder.tokenizer_json, encoder)
    if graph is None:
        raise ExportError(f"{folder} has neither weights (model.safetensors) nor a backbone graph (model.onnx)")
    if (folder / SPEC_FILE).is_file():
        raise ExportError(f"{folder} was exported already: give the folder with its weights")
    spec, config = _spec(folder, given), read_config(folder)
    check_length(folder, config, spec.max_length)
    if (size := sum(path.stat().st_size for path in graph.parent.glob("*.onnx*"))) > LARGEST_BYTES:
        raise ExportError(f"{folder}: a graph of {size / 2**30:.1f} GiB is not read; give the folder with its weights")
    return Source(spec, config, read_tokenizer(folder, spec.pooling, config), graph)


def has_weights(folder: Path) -> bool:
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def weights_name(folder: Path) -> str:
    """As the spec of an encoder folder names its own (`EncoderSpec.identities`)."""
    names = {*weight_files(folder), *(path.name for path in folder.glob(WEIGHTS[1]))}
    return name_of_weights({name: sha256_of(folder / name) for name in names})


def _spec(folder: Path, given: dict[str, Any]) -> EncoderSpec:
    if not (folder / SPEC_FILE).is_file():
        if "space" not in given:
            raise ExportError(f"{folder} does not name its embedding space: give one (--space)")
        return infer_spec(folder, **given)
    spec = EncoderSpec.load(folder)
    try:
        return EncoderSpec.model_validate(spec.model_dump() | given)
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

"""What an export starts from: weights that torch loads, or a backbone graph that someone exported already.

Both give the same things: a spec, a tokenizer, a configuration, and the vectors that every graph is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from pydantic import ValidationError
from transformers import PretrainedConfig

from models.encoder.folder import check_length, infer_spec, read_config, read_tokenizer
from models.encoder.spec import SPEC_FILE, EncoderSpec, fault, name_of_weights, sha256_of
from models.encoder.tokenizer import Tokenizer, pad
from models.encoder.torch import Projection, TorchEncoder, embed, weight_files
from models.errors import ExportError
from models.export.backbone import HIDDEN_NAMES, IDS, MASK, POSITIONS, TYPES
from models.export.parity import Vectors

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
            return self.origin.encode(texts, self.spec.sides[0])
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

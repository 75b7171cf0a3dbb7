"""Exports the fp32 graph: the backbone by torch or Optimum, and the head (pooling, truncation, L2 norm).

Optimum runs in an environment of its own, because it pins an older transformers (docs/adr/0002-export-split.md). It
only reads folders that were written here, never a downloaded checkpoint.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, load_model_from_string, numpy_helper
from onnxruntime.transformers.onnx_model import OnnxModel
from torch import Tensor, nn
from torch.onnx import OnnxExporterError
from transformers import PretrainedConfig, PreTrainedModel

from models.encoder.folder import CONFIG_FILE
from models.encoder.spec import EncoderSpec, Pooling
from models.encoder.torch import Projection
from models.errors import ExportError

HIDDEN = "last_hidden_state"
# What exporters call the hidden states: transformers' tasks, and sentence-transformers' own.
HIDDEN_NAMES = (HIDDEN, "token_embeddings")
EMBEDDING, SCORE = "embedding", "score"
IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"
FUSED_DOMAIN = "com.microsoft"  # fused graphs use it, and not all that fuse declare it
FIRST_OPSET = 13  # the first whose ReduceSum takes its axes as an input
EPSILON = 1e-12  # that of torch.nn.functional.normalize


class _Nodes:
    """Collects nodes and constants; the prefix keeps their names apart from those of the backbone."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, op: str, *inputs: str, output: str | None = None, **attributes: int) -> str:
        name = f"{self._prefix}/{op}_{len(self.nodes)}"
        node = helper.make_node(op, list(inputs), [output or name], name=name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return output or name

    def constant(self, value: ArrayLike) -> str:
        name = f"{self._prefix}/constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, order="C"), name))
        return name


def append_head(model: ModelProto, spec: EncoderSpec, projection: Projection | None = None) -> None:
    """Makes a backbone graph the whole function, in place.

    input_ids and attention_mask (texts, tokens) in, embedding (texts, dim) out in float32. A projection
    comes between pooling and truncation.
    """
    hidden, before, after = _begin_head(model)
    _embed(after, hidden, spec, projection)
    _finish_head(model, before, after, helper.make_tensor_value_info(EMBEDDING, TensorProto.FLOAT, ["batch", spec.dim]))


def append_score_head(model: ModelProto, layers: Sequence[nn.Linear], separator: int | None) -> None:
    """Makes a backbone graph a reranker, in place: tokens of pairs in, score (pairs,) out in float32.

    `layers` read the first token's state, with tanh between them. `separator` is the token that ends the query, if
    the backbone tells the two texts apart by token types.
    """
    hidden, before, after = _begin_head(model, separator)
    state = _pool(after, hidden, Pooling.CLS)
    for place, layer in enumerate(layers):
        state = after.add("Tanh", state) if place else state
        state = _linear(after, state, layer)
    after.add("Squeeze", state, after.constant([1]), output=SCORE)
    _finish_head(model, before, after, helper.make_tensor_value_info(SCORE, TensorProto.FLOAT, ["batch"]))


def _begin_head(model: ModelProto, separator: int | None = None) -> tuple[str, _Nodes, _Nodes]:
    """Returns the name of the hidden states, nodes that make the backbone's other inputs, and nodes for the head."""
    graph = model.graph
    hidden = next((output.name for output in graph.output if output.name in HIDDEN_NAMES), None)
    if hidden is None:
        found = ", ".join(output.name for output in graph.output)
        raise ExportError(f"the graph gives {found}, not {' or '.join(HIDDEN_NAMES)}: export the bare backbone")
    _check_inputs(model)
    before = _Nodes("head/in")
    _derive_inputs(before, {value.name for value in graph.input}, separator)
    return hidden, before, _Nodes("head/out")


def _finish_head(model: ModelProto, before: _Nodes, after: _Nodes, output: ValueInfoProto) -> None:
    graph = model.graph
    for node in reversed(before.nodes):
        graph.node.insert(0, node)
    graph.node.extend(after.nodes)
    graph.initializer.extend([*before.constants, *after.constants])
    inputs = [value for value in graph.input if value.name in (IDS, MASK)]
    del graph.input[:], graph.output[:]
    graph.input.extend(inputs)
    graph.output.append(output)
    if all(opset.domain != FUSED_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(FUSED_DOMAIN, 1))
    OnnxModel(model).prune_graph(allow_remove_graph_inputs=False)


def _check_inputs(backbone: ModelProto) -> None:
    version = next(opset.version for opset in backbone.opset_import if opset.domain in ("", "ai.onnx"))
    if version < FIRST_OPSET:
        raise ExportError(f"the graph is of opset {version}: export it with opset {FIRST_OPSET} or newer")
    names = {value.name for value in backbone.graph.input}
    if names - {IDS, MASK, TYPES, POSITIONS} or not {IDS, MASK} <= names:
        raise ExportError(f"the graph takes {', '.join(sorted(names))}: an encoder takes {IDS} and {MASK}")


def _derive_inputs(added: _Nodes, names: set[str], separator: int | None) -> None:
    """Inputs that follow from ids and mask are computed inside: positions count the mask, and every token is of type
    0, or those behind the first separator of type 1."""
    if TYPES in names and separator is None:
        added.add("Sub", IDS, IDS, output=TYPES)
    elif TYPES in names:
        ends = added.add("Cast", added.add("Equal", IDS, added.constant(separator or 0)), to=TensorProto.INT64)
        ended = added.add("CumSum", ends, added.constant(1), exclusive=1)
        behind = added.add("Cast", added.add("Greater", ended, added.constant(0)), to=TensorProto.INT64)
        added.add("Mul", behind, MASK, output=TYPES)
    if POSITIONS in names:
        counted = added.add("CumSum", MASK, added.constant(1))
        added.add("Max", added.add("Sub", counted, added.constant(1)), added.constant(0), output=POSITIONS)


def _embed(added: _Nodes, hidden: str, spec: EncoderSpec, projection: Projection | None) -> None:
    pooled = _pool(added, hidden, spec.pooling)
    if projection is not None:
        if projection.hidden is not None:
            units = added.add("Relu", _linear(added, pooled, projection.hidden))
            pooled = added.add("Concat", pooled, units, axis=1)
        pooled = _linear(added, pooled, projection)
        pooled = added.add("Tanh", pooled) if projection.tanh else pooled
    bounds = [added.constant([place]) for place in (0, spec.dim, 1)]
    if not spec.normalize:
        added.add("Slice", pooled, *bounds, output=EMBEDDING)
        return
    cut = added.add("Slice", pooled, *bounds)
    squares = added.add("ReduceSum", added.add("Mul", cut, cut), added.constant([1]), keepdims=1)
    length = added.add("Max", added.add("Sqrt", squares), added.constant(np.float32(EPSILON)))
    added.add("Div", cut, length, output=EMBEDDING)


def _linear(added: _Nodes, inputs: str, layer: nn.Linear) -> str:
    product = added.add("MatMul", inputs, added.constant(layer.weight.detach().float().numpy().T))
    if layer.bias is None:
        return product
    return added.add("Add", product, added.constant(layer.bias.detach().float().numpy()))


def _pool(added: _Nodes, hidden: str, pooling: Pooling) -> str:
    """Returns the pooled states (texts, native_dim) in float32, also of hidden states in half precision."""
    if pooling is Pooling.CLS:
        return added.add("Cast", added.add("Gather", hidden, added.constant(0), axis=1), to=TensorProto.FLOAT)
    if pooling is Pooling.EOS:
        # The count of real tokens first reaches its maximum at the last of them, whichever side is padded.
        count = added.add("Cast", added.add("CumSum", MASK, added.constant(1)), to=TensorProto.FLOAT)
        last = added.add("ArgMax", count, axis=1, keepdims=1)
        return added.add("Cast", added.add("GatherND", hidden, last, batch_dims=1), to=TensorProto.FLOAT)
    weights = added.add("Cast", added.add("Unsqueeze", MASK, added.constant([2])), to=TensorProto.FLOAT)
    states = added.add("Mul", added.add("Cast", hidden, to=TensorProto.FLOAT), weights)
    tokens = added.add("ReduceSum", weights, added.constant([1]), keepdims=0)
    total = added.add("ReduceSum", states, added.constant([1]), keepdims=0)
    return added.add("Div", total, added.add("Max", tokens, added.constant(np.float32(1))))


OPSET = 18


class _Backbone(nn.Module):
    """The backbone with positional inputs and one output, as the tracer wants it."""

    def __init__(self, backbone: PreTrainedModel, inputs: list[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.inputs = inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.inputs, tensors, strict=True))
        output = self.backbone(**given | {MASK: _attention_masks(self.backbone, given[MASK])})
        hidden: Tensor = output.last_hidden_state
        if not self.backbone.config.num_hidden_layers:
            # Without layers only the pooling looks at the mask: it must not vanish from the graph's inputs.
            hidden = hidden * given[MASK].unsqueeze(-1)
        return hidden


def _attention_masks(backbone: PreTrainedModel, mask: Tensor) -> Tensor | dict[str, Tensor]:
    """Returns what a bidirectional Gemma 3 adds to its scores, by type of layer; for other backbones the mask itself.

    The tracer cannot follow transformers in making these.
    """
    if not getattr(backbone.config, "use_bidirectional_attention", False):
        return mask
    seen = mask[:, None, None, :].bool()
    places = torch.arange(mask.shape[1], device=mask.device)
    near = (places[:, None] - places).abs() < backbone.config.sliding_window
    never = torch.finfo(backbone.dtype).min
    allowed = {"full_attention": seen, "sliding_attention": seen & near}
    return {kind: torch.zeros_like(of, dtype=backbone.dtype).masked_fill(~of, never) for kind, of in allowed.items()}


def export_backbone(backbone: PreTrainedModel, path: Path) -> None:
    """Writes the fp32 graph input_ids, attention_mask (, token_type_ids) → last_hidden_state, any batch and length."""
    _trace(backbone, str(path), weights=True)


def trace_backbone(backbone: PreTrainedModel) -> tuple[ModelProto, dict[str, Tensor]]:
    """Returns the graph of `export_backbone` without its weights, and the weights by the names that its nodes use."""
    file = BytesIO()
    traced = _trace(backbone, file, weights=False)
    model, state = load_model_from_string(file.getvalue()), traced.state_dict()
    # Of equal weights only one is an input: the others are nodes that repeat it.
    weights = {value.name: state[value.name] for value in model.graph.input if value.name in state}
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model, weights


def _trace(backbone: PreTrainedModel, target: Any, *, weights: bool) -> nn.Module:  # noqa: ANN401 - a path or a file
    """Traces into a file. The module that is returned has the weights under the names of the graph.

    The tracing exporter with eager attention, because only its graphs get ONNX Runtime's Attention fusion. Token
    types are an input if the backbone has them: the embedding fusion looks for it, and the head removes it.
    """
    backbone.set_attn_implementation("eager")
    ids = torch.arange(1, 19).reshape(2, 9) % backbone.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    examples = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in inspect.signature(backbone.forward).parameters:
        examples["token_type_ids"] = torch.zeros_like(ids)
    traced = _Backbone(backbone, list(examples)).eval()
    with warnings.catch_warnings():
        # The tracer is deprecated in favour of one without Attention fusion, and remarks on every Python branch;
        # that no branch was frozen wrongly is for the parity check to see, which runs many lengths.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                traced,
                tuple(examples.values()),
                target,
                input_names=list(examples),
                output_names=[HIDDEN],
                dynamic_axes={name: {0: "batch", 1: "sequence"} for name in (*examples, HIDDEN)},
                opset_version=OPSET,
                dynamo=False,
                export_params=weights,
                do_constant_folding=weights,  # without weights: it would transpose every one of them
            )
        except OnnxExporterError as error:
            raise ExportError(f"torch cannot export a {backbone.config.model_type}: {error}") from error
    return traced


PYTHON_VARIABLE = "CARE_OPTIMUM_PYTHON"
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-optimum" / "bin" / "python"
WORKER = Path(__file__).with_name("optimum_worker.py")
HOW_TO = f"make optimum creates it, or name its interpreter in {PYTHON_VARIABLE}"
TIMEOUT_SECONDS = 3600
# What was seen exported right. Optimum lists many more; GteModel is not among them.
EXPORTS = frozenset({"bert", "roberta", "xlm-roberta", "modernbert", "qwen2", "qwen3"})
OPTIMIZES = EXPORTS - {"qwen2", "qwen3"}


def find_python(given: Path | None = None) -> Path | None:
    """Finds the interpreter of the Optimum environment: as given, by the variable, else in the repository."""
    named = given or (Path(value) if (value := os.environ.get(PYTHON_VARIABLE)) else None)
    if named is not None and not named.is_file():
        raise ExportError(f"no Optimum interpreter at {named}: {HOW_TO}")
    return named or (DEFAULT_PYTHON if DEFAULT_PYTHON.is_file() else None)


def write_backbone(backbone: PreTrainedModel, folder: Path) -> None:
    """Writes the backbone for Optimum's transformers: safetensors and a configuration in its dialect."""
    backbone.save_pretrained(folder)
    values = json.loads((folder / CONFIG_FILE).read_bytes())
    (folder / CONFIG_FILE).write_text(json.dumps(older_dialect(values), indent=2), encoding="utf-8")


def write_graph_config(config: PretrainedConfig, folder: Path) -> None:
    """Lays the configuration beside a graph: Optimum's tools read the number of heads and the width from it."""
    text = json.dumps(older_dialect(config.to_dict()), indent=2)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def older_dialect(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a transformers 5 configuration as transformers 4 reads it, where rotary settings had names of their own.

    Left as it is, transformers 4 would ignore them and silently use its defaults.
    """
    values = dict(values)
    rope = values.pop("rope_parameters", None)
    if rope is None:
        return values
    if "full_attention" in rope:
        scaled = [part for part in rope.values() if part["rope_type"] != "default"]
        values["global_rope_theta"] = rope["full_attention"]["rope_theta"]
        values["local_rope_theta"] = rope["sliding_attention"]["rope_theta"]
    else:
        scaled = [rope] if rope["rope_type"] != "default" else []
        values["rope_theta"] = rope["rope_theta"]
    if scaled:
        raise ExportError(f"Optimum's transformers cannot scale rotary positions by {scaled[0]!r}: use backend torch")
    return values


def run_worker(python: Path, job: str, source: Path, target: Path) -> None:
    """Runs one job of `optimum_worker`: export, optimize or quantize."""
    command = [str(python), "-I", str(WORKER), job, str(source), str(target)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=offline, timeout=TIMEOUT_SECONDS)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExportError(f"Optimum could not {job} the encoder ({last}): use backend torch") from error
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"Optimum took more than {TIMEOUT_SECONDS} s to {job} the encoder") from error

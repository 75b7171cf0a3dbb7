"""Encoder in torch, for training and export: backbone, pooling, truncation, norm.

Texts are padded on the right.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from models.encoder.folder import (
    CONFIG_FILE,
    DECODERS,
    DenseLayer,
    check_length,
    dense_layers,
    looks_back_only,
    read_config,
    read_tokenizer,
)
from models.encoder.spec import JOIN_FILE, SPEC_FILE, TOKENIZER_FILE, EncoderSpec, Pooling, Side, sha256_of, verify_file
from models.encoder.tokenizer import Tokenizer, pad
from models.errors import BadEncoder

Vectors = NDArray[np.float32]

PROJECTION_FILE = "projection.safetensors"
ADAPTER_FOLDER = "adapter"
# In an adapter's folder: which weights it was trained on.
BASE_FILE = "base.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYER = re.compile(r"\.\d+\.")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", f"{ADAPTER_FOLDER}/adapter_*.*")


class Projection(nn.Linear):
    """A dense layer on top of pooling, as sentence-transformers' Dense: linear, then perhaps tanh.

    With `hidden` units it also reads what they make of the pooled vector: a linear map of 512 numbers alone reaches no
    more than 512 directions.
    """

    def __init__(
        self, width: int, dim: int, *, hidden: int = 0, bias: bool = False, tanh: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(width + hidden, dim, bias=bias, dtype=dtype)
        self.tanh, self.width, self.hidden_units = tanh, width, hidden
        self.hidden = nn.Linear(width, hidden, dtype=dtype) if hidden else None

    def features(self, pooled: Tensor) -> Tensor:
        """Returns what the linear layer reads: the pooled vectors, and the hidden units beside them."""
        # Pooling gives float32 whatever the weights are.
        pooled = pooled.to(self.weight.dtype)
        return pooled if self.hidden is None else torch.cat([pooled, self.hidden(pooled).relu()], dim=-1)

    def forward(self, input: Tensor) -> Tensor:
        projected = super().forward(self.features(input))
        return projected.tanh() if self.tanh else projected

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype) -> Projection:
        try:
            tensors = load_file(path)
            with safe_open(path, "pt") as file:
                tanh = (file.metadata() or {}).get("activation") == "tanh"
            dim, features = tensors["weight"].shape
            hidden = len(tensors.get("hidden.bias", ()))
            projection = cls(features - hidden, dim, hidden=hidden, bias="bias" in tensors, tanh=tanh, dtype=dtype)
            projection.load_state_dict(tensors)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise BadEncoder(f"{path}: damaged or not a projection; copy the folder again") from error
        return projection

    def save(self, path: Path) -> None:
        tensors = {name: value.detach().contiguous().cpu() for name, value in self.state_dict().items()}
        save_file(tensors, path, metadata={"activation": "tanh"} if self.tanh else None)


class TorchEncoder(nn.Module):
    """A function from token ids to unit vectors that can be trained."""

    def __init__(
        self, backbone: PreTrainedModel, spec: EncoderSpec, tokenizer_json: str, projection: Projection | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = projection
        self.spec = spec
        self.tokenizer_json = tokenizer_json
        self.tokenizer = Tokenizer.from_json(tokenizer_json, spec.max_length)
        self._causal = looks_back_only(backbone.config) and any(
            getattr(module, "is_causal", False) for module in backbone.modules()
        )

    @classmethod
    def load(cls, folder: Path, spec: EncoderSpec | None = None, *, dtype: torch.dtype = torch.float32) -> TorchEncoder:
        """Opens an encoder folder, or a transformers folder of which `spec` says how it is used; in eval mode.

        An encoder folder is verified against its checksums, and no weight may be left over; of a transformers
        folder, heads that the encoder does not use are left aside. No weight may be missing from either. A LoRA
        adapter in `adapter/` is merged into the weights.
        """
        own = EncoderSpec.load(folder) if (folder / SPEC_FILE).is_file() else None
        spec = spec or own
        if spec is None:
            raise BadEncoder(
                f"{folder} has no {SPEC_FILE}: say how the encoder is used (models.encoder.folder.infer_spec)"
            )
        if spec.beside is not None:
            raise BadEncoder(
                f"{folder} holds two encoders side by side: care index build reads it, and care eval as "
                f"{folder},precision=bf16"
            )
        if own is not None:
            _verify(folder, own)
        config = read_config(folder)
        projection = _load_projection(folder, config.hidden_size, dtype)
        width = config.hidden_size if projection is None else projection.out_features
        if width != spec.native_dim:
            raise BadEncoder(f"{folder}: the vectors have {width} dimensions, the spec says {spec.native_dim}")
        check_length(folder, config, spec.max_length)
        backbone = _load_backbone(folder, config, dtype, strict=own is not None)
        if (folder / ADAPTER_FOLDER).is_dir():
            backbone = merge_adapter(backbone, folder / ADAPTER_FOLDER)
        return cls(backbone, spec, read_tokenizer(folder, spec.pooling, config), projection).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns unit vectors (texts, dim) in float32 of ids and mask (texts, tokens)."""
        return finish(self.pooled(input_ids, attention_mask), self.spec)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor, *, padded_right: bool = False) -> Tensor:
        """Returns what `forward` cuts and normalises: (texts, native_dim) in float32.

        A decoder never looks to the right: if the caller knows that padding stands there, it needs no mask, and
        attention without a mask has quicker kernels.
        """
        mask = None if padded_right and self._causal else attention_mask
        output = self.backbone(input_ids=input_ids, attention_mask=mask)
        vectors = pool(output.last_hidden_state, attention_mask, self.spec.pooling)
        return (vectors if self.projection is None else self.projection(vectors)).float()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], side: Side, batch_size: int = 64) -> Vectors:
        """Returns unit vectors (texts, dim) in the order given, in batches of like lengths."""
        instruction = self.spec.instruction(side)
        tokens = self.tokenizer.batch([instruction + text for text in texts])
        order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]), reverse=True)
        vectors = np.empty((len(tokens), self.spec.dim), dtype=np.float32)
        device = next(self.parameters()).device
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids, mask = (torch.from_numpy(array).to(device) for array in pad([tokens[row] for row in rows]))
            vectors[rows] = self(ids, mask).cpu().numpy()
        return vectors

    def save(self, folder: Path) -> None:
        """Writes an encoder folder that `load` opens again; `encoder.json`, with the checksums, comes last."""
        if (folder / ADAPTER_FOLDER).exists():
            raise BadEncoder(f"{folder} holds an adapter, which would be merged again; save into another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder, save_original_format=False)
        if self.projection is not None:
            self.projection.save(folder / PROJECTION_FILE)
        (folder / TOKENIZER_FILE).write_text(self.tokenizer_json, encoding="utf-8")
        checksums = {name: sha256_of(folder / name) for name in (TOKENIZER_FILE, *weight_files(folder))}
        self.spec.model_copy(update={"checksums": checksums, "parity": {}, "weights": None}).save(folder)


def embed(hidden: Tensor, mask: Tensor, spec: EncoderSpec) -> Tensor:
    """Embeddings (texts, dim) of hidden states (texts, tokens, native_dim): pooled, cut to dim, then normalised."""
    return finish(pool(hidden, mask, spec.pooling).float(), spec)


def finish(pooled: Tensor, spec: EncoderSpec) -> Tensor:
    """Cuts pooled vectors (texts, native_dim) to dim, then normalises them."""
    vectors = pooled[:, : spec.dim]
    return functional.normalize(vectors, dim=-1) if spec.normalize else vectors


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pools to one vector per text (texts, native_dim); masked positions never count, for EOS on either side."""
    if pooling is Pooling.CLS:
        return hidden[:, 0]
    if pooling is Pooling.EOS:
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    weights = mask.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def _load_projection(folder: Path, width: int, dtype: torch.dtype) -> Projection | None:
    path = folder / PROJECTION_FILE
    if not path.is_file():
        return read_dense_layers(folder, width, dtype) if not (folder / SPEC_FILE).is_file() else None
    projection = Projection.load(path, dtype)
    if projection.width != width:
        raise BadEncoder(f"{path}: made for vectors of {projection.width} dimensions, the backbone's have {width}")
    return projection


def read_dense_layers(folder: Path, width: int, dtype: torch.dtype) -> Projection | None:
    """Reads the Dense modules of a sentence-transformers folder as one layer, with hidden units if one ends in ReLU.

    `width` is that of the pooled vectors.
    """
    layers = dense_layers(folder)
    if not layers:
        return None
    if (takes := [layer.width for layer in layers]) != (gets := [width, *(layer.dim for layer in layers[:-1])]):
        raise BadEncoder(f"{folder}: its dense layers take vectors of {takes} dimensions and get those of {gets}")
    *inner, last = activations = [layer.activation for layer in layers]
    if "Tanh" in inner or inner.count("ReLU") > 1 or last == "ReLU":
        raise BadEncoder(
            f"{folder}: dense layers with {', '.join(activations)} are not supported, only linear ones, with ReLU "
            "behind one that is not the last, and with Tanh behind the last"
        )
    place = inner.index("ReLU") + 1 if "ReLU" in inner else 0
    tensors, first = _multiplied(layers[place:]), _multiplied(layers[:place])
    biased, units = "bias" in tensors, 0
    if first:  # the units alone are read, not the pooled vector beside them
        units = len(first["weight"])
        tensors["weight"] = functional.pad(tensors["weight"], (width, 0))
        tensors |= {"hidden.weight": first["weight"], "hidden.bias": first.get("bias", torch.zeros(units))}
    projection = Projection(width, layers[-1].dim, hidden=units, bias=biased, tanh=last == "Tanh", dtype=dtype)
    projection.load_state_dict(tensors)
    return projection


def _multiplied(layers: Sequence[DenseLayer]) -> dict[str, Tensor]:
    """Returns weight and bias of layers as one: without an activation between them they are one linear function."""
    whole: dict[str, Tensor] = {}
    for layer in layers:
        own = {name: value.double() for name, value in layer.tensors().items()}
        if "bias" in whole:
            own["bias"] = own["weight"] @ whole["bias"] + own.get("bias", 0)
        if whole:
            own["weight"] = own["weight"] @ whole["weight"]
        whole = own
    return whole


def _load_backbone(folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, strict: bool) -> PreTrainedModel:
    # A pooler that was not trained would be initialised at random, and reported as missing.
    native = cast(type[PreTrainedModel], MODEL_MAPPING[type(config)])
    pooler = {"add_pooling_layer"} & inspect.signature(native).parameters.keys()
    backbone = load_model(AutoModel, folder, config, dtype, strict=strict, off=pooler)
    if config.model_type in DECODERS and not looks_back_only(config):
        # transformers leaves the mask out if all texts are equally long, and then goes by this.
        for module in backbone.modules():
            if hasattr(module, "is_causal"):
                setattr(module, "is_causal", False)  # noqa: B010 - torch's stubs allow tensors and modules alone
    return backbone


def load_model(
    kind: Any, folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, new: tuple[str, ...] = (),  # noqa: ANN401
    strict: bool = False, off: Iterable[str] = (),
) -> PreTrainedModel:  # fmt: skip
    """Loads a model of one of transformers' Auto classes, with the options in `off` set to false.

    No weight may be missing but those whose names begin with `new`. No layer may be left over, and if `strict`, no
    weight at all.
    """
    # No bars and no warnings: weights that do not fit are our own errors.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options = {"local_files_only": True, "output_loading_info": True, "weights_only": True} | dict.fromkeys(off, False)
    try:
        model, report = kind.from_pretrained(folder, config=config, dtype=dtype, **options)
    except OSError as error:
        raise BadEncoder(f"{folder}: no weights (model.safetensors or pytorch_model.bin)") from error
    except UnpicklingError as error:
        raise BadEncoder(f"{folder}: pytorch_model.bin holds more than weights and was not read") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise BadEncoder(
            f"{folder}: the weights are damaged or not those of {CONFIG_FILE}; fetch them again"
        ) from error
    except (LookupError, TypeError, ArithmeticError) as error:  # an activation that is none, zero heads
        raise BadEncoder(f"{folder}: {CONFIG_FILE} does not describe a {config.model_type}: {error!r}") from error
    wrong = {key for key in report["missing_keys"] if not key.startswith(new)}
    wrong |= {str(key) for key in report["mismatched_keys"]} | (set(report["unexpected_keys"]) if strict else set())
    if wrong:
        some = ", ".join(sorted(wrong)[:3])
        raise BadEncoder(f"{folder}: {len(wrong)} weights do not fit {config.model_type} ({some}…)")
    own = tuple({_LAYER.sub(".#.", name) for name in model.state_dict() if _LAYER.search(name)})
    if more := [name for name in sorted(report["unexpected_keys"]) if _LAYER.sub(".#.", name).endswith(own)]:
        stated = f"the weights have more layers than {CONFIG_FILE} says ({more[0]})"
        raise BadEncoder(f"{folder}: {stated}; fetch both files again, from one checkpoint")
    found: PreTrainedModel = model
    return found


def merge_adapter(backbone: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Returns the backbone with a LoRA adapter in its weights."""
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(backbone, adapter, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BadEncoder(f"{adapter}: not an adapter of this backbone; save it by peft's save_pretrained") from error
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged


def keep_layers(backbone: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Keeps only the first layers of a transformer, and returns it."""
    config = backbone.config
    for parent in backbone.modules():
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
                setattr(parent, name, child[:layers])
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return backbone


def published_dtype(config: PretrainedConfig) -> torch.dtype:
    """Returns the numbers in which the checkpoint was published."""
    stated = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return DTYPES.get(stated, torch.float32)


def weights_digest(model: nn.Module) -> str:
    """Hashes the weights in float32. Names and order do not count: they differ between versions of transformers."""
    digests = sorted(
        sha256(weight.detach().float().cpu().contiguous().numpy().data).digest() for weight in model.parameters()
    )
    return sha256(b"".join(digests)).hexdigest()


def not_finite(model: nn.Module) -> str | None:
    """Returns the name of the first weight that holds NaN or infinity, if there is one."""
    return next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)


def weight_files(folder: Path) -> list[str]:
    """Returns names of the files that hold the weights, and of the configuration that says how they are used.

    What becomes of the vectors of two joined encoders is not of either one's own.
    """
    names = sorted(path.relative_to(folder).as_posix() for pattern in WEIGHTS for path in folder.glob(pattern))
    return [CONFIG_FILE, *(name for name in names if name != JOIN_FILE)]


def _verify(folder: Path, spec: EncoderSpec) -> None:
    if not any(folder.glob(WEIGHTS[0])):
        raise BadEncoder(f"{folder}: no safetensors weights: it can be served, not trained or exported")
    for name in (TOKENIZER_FILE, *weight_files(folder)):
        verify_file(folder, name, spec)

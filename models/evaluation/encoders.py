"""Encoder folders as an evaluation opens them: ONNX graphs, torch weights, transformers checkpoints.

All become one thing, a function from texts as they stand to unit vectors, with a fingerprint that names the function.
torch and transformers are loaded only when a folder needs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from models.errors import BadEncoder, CareError
from models.evaluation.cache import Vectors
from models.onnx_encoder import OnnxEncoder
from models.reader import has_graph
from models.spec import SPEC_FILE, EncoderSpec, Pooling, Precision, Side, Variant, sha256_of

DEVICE, DTYPE, MAX_LENGTH, POOLING, PRECISION, VARIANT = (
    "device", "dtype", "max_length", "pooling", "precision", "variant"
)  # fmt: skip
NO_INSTRUCTIONS = {"query_instruction": "", "document_instruction": ""}
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
CONFIG_FILE = "config.json"
# What of a checkpoint decides about its vectors.
CHECKPOINT_FILES = (
    CONFIG_FILE,
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    *WEIGHTS,
    "adapter/adapter_*.*",
)


@dataclass(frozen=True, slots=True)
class OpenEncoder:
    """An opened folder; `encode` gives unit vectors (texts, dim) of texts as they stand, without any instruction."""

    name: str
    spec: EncoderSpec
    fingerprint: str
    parameters: int | None
    """None where the folder does not tell without more than inference needs."""
    encode: Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True, slots=True)
class Address:
    """A folder or a service, and how to use it where it does not say so itself."""

    place: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str, known: Sequence[str]) -> Address:
        """`PLACE,name=value,…`; a comma that no known name follows belongs to the place."""
        parts = text.split(",")
        options: dict[str, str] = {}
        while len(parts) > 1 and parts[-1].partition("=")[0] in known:
            name, _, value = parts.pop().partition("=")
            options[name] = value
        if not all(options.values()):
            raise CareError(f"{text}: write PLACE,name=value with a name of {', '.join(known)}")
        return cls(",".join(parts), options)


def open_encoder(text: str) -> OpenEncoder:
    """Opens `FOLDER[,pooling=mean,…]`; pooling and max_length matter to folders without encoder.json only.

    A precision has the folder read as the indexer reads an LLM's.
    """
    address = Address.parse(text, (DEVICE, DTYPE, MAX_LENGTH, POOLING, PRECISION, VARIANT))
    folder, options = Path(address.place), address.options
    if not folder.is_dir():
        raise BadEncoder(f"{folder}: no such encoder folder")
    described = (folder / SPEC_FILE).is_file()
    if described and (POOLING in options or MAX_LENGTH in options):
        raise BadEncoder(f"{text}: the folder's {SPEC_FILE} says its {POOLING} and {MAX_LENGTH}; leave them out")
    _choice(options, DEVICE, DEVICES)
    if PRECISION in options:
        if DTYPE in options or VARIANT in options:
            raise BadEncoder(f"{text}: a {PRECISION} says in what numbers to compute; leave {DTYPE} and {VARIANT} out")
        return _open_packed(folder, options)
    if described and has_graph(folder) and DTYPE not in options:
        return _open_onnx(folder, options)
    if VARIANT in options:
        raise BadEncoder(
            f"{text}: there is no ONNX graph to choose from (a {DTYPE} asks for torch); leave {VARIANT} out"
        )
    return _open_torch(folder, options)


def _open_onnx(folder: Path, options: dict[str, str]) -> OpenEncoder:
    variant = Variant(_choice(options, VARIANT, list(Variant))) if VARIANT in options else None
    encoder = OnnxEncoder.load(folder, variant, device=options.get(DEVICE, DEVICES[0]))
    name = f"{folder.resolve().name} ({encoder.variant})"
    return OpenEncoder(
        name, encoder.spec, encoder.fingerprint, None, lambda texts: encoder.encode_bulk(encoder.tokenizer.batch(texts))
    )


def _open_torch(folder: Path, options: dict[str, str]) -> OpenEncoder:
    if not (folder / CONFIG_FILE).is_file():
        raise BadEncoder(f"{folder} holds neither {SPEC_FILE} with an ONNX graph nor {CONFIG_FILE} with torch weights")
    dtype = _choice(options, DTYPE, DTYPES)
    # By name: whoever imports this module must not need torch.
    torch, torch_encoder = import_module("torch"), import_module("models.torch_encoder")
    spec = EncoderSpec.load(folder) if (folder / SPEC_FILE).is_file() else _inferred(folder, options)
    plain = spec.model_copy(update=NO_INSTRUCTIONS)
    device = options.get(DEVICE, DEVICES[0])
    if device == "cuda" and not torch.cuda.is_available():
        raise BadEncoder(f"{DEVICE}={device}: torch sees no graphics card here; leave it out")
    encoder = torch_encoder.TorchEncoder.load(folder, plain, dtype=getattr(torch, dtype)).to(device)
    return OpenEncoder(
        name=folder.resolve().name if dtype == DTYPES[0] else f"{folder.resolve().name} ({dtype})",
        spec=spec,
        fingerprint=_fingerprint(folder, spec, dtype),
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        encode=lambda texts: encoder.encode(texts, Side.DOCUMENT),
    )


def _open_packed(folder: Path, options: dict[str, str]) -> OpenEncoder:
    precision = Precision(_choice(options, PRECISION, list(Precision)))
    spec = EncoderSpec.load(folder)
    plain = spec.model_copy(update=NO_INSTRUCTIONS)
    packed = import_module("models.packed.encoder").PackedEncoder
    encoder = packed.load(folder, plain, device=options.get(DEVICE), precision=precision)
    return OpenEncoder(
        name=f"{folder.resolve().name} ({precision})",
        spec=spec,
        fingerprint=encoder.fingerprint,
        parameters=None,
        encode=lambda texts: encoder.encode(texts, Side.DOCUMENT),
    )


def _inferred(folder: Path, options: dict[str, str]) -> EncoderSpec:
    given: dict[str, Any] = {}
    if POOLING in options:
        given[POOLING] = Pooling(_choice(options, POOLING, list(Pooling)))
    if MAX_LENGTH in options:
        if not options[MAX_LENGTH].isdecimal():
            raise BadEncoder(f"{MAX_LENGTH}={options[MAX_LENGTH]} is not a whole number")
        given[MAX_LENGTH] = int(options[MAX_LENGTH])
    spec: EncoderSpec = import_module("models.transformers_folder").infer_spec(
        folder, space=folder.resolve().name, **given
    )
    return spec


def _fingerprint(folder: Path, spec: EncoderSpec, dtype: str) -> str:
    """Names the function from the spec, the arithmetic and the content of every file that decides about it."""
    facts = spec.model_dump(mode="json", include={"pooling", "dim", "max_length", "normalize"})
    paths = {path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern)}
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in sorted(paths)}
    return hashlib.sha256(json.dumps([facts, dtype, files], sort_keys=True).encode()).hexdigest()[:16]


def _choice(options: dict[str, str], name: str, known: Sequence[str]) -> str:
    """The option's value, the first of `known` where it is not given."""
    value = options.get(name, known[0])
    if value not in known:
        raise BadEncoder(f"{name}={value}: choose from {', '.join(known)}")
    return value

"""Opens encoders for an evaluation: folders as functions of texts.

torch and transformers are loaded only when a folder needs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from models.encoder.onnx import OnnxEncoder, OnnxReranker
from models.encoder.pairs import PairTokenizer
from models.encoder.spec import POOLINGS, SPEC_FILE, EncoderSpec, Pooling, Precision, Side, Variant, sha256_of
from models.encoder.tokenizer import Tokens, has_graph
from models.errors import BadEncoder, CareError
from models.evaluation.cache import Vectors

OPTIONS = DEVICE, DTYPE, MAX_LENGTH, POOLING, PRECISION, SHARE, VARIANT = (
    "device", "dtype", "max_length", "pooling", "precision", "share", "variant"
)  # fmt: skip
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
CONFIG_FILE = "config.json"
# What of a checkpoint decides about its vectors.
CHECKPOINT_FILES = (
    CONFIG_FILE, "*token*.json", "vocab.*", "merges.txt", "*.model", "*.safetensors", "pytorch_model*.bin",
    "adapter/adapter_*.*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenEncoder:
    """An opened folder; `encode` gives unit vectors (texts, dim) of texts as they stand, without any instruction."""

    name: str
    spec: EncoderSpec
    fingerprint: str
    parameters: int | None
    """None where counting them takes more than inference needs."""
    encode: Callable[[Sequence[str]], Vectors]
    parts: Parts | None = None
    """If two encoders are joined."""

    @property
    def cached_as(self) -> tuple[str, int]:
        """The name and the dimensions of what a cache keeps."""
        return (self.fingerprint, self.spec.dim) if self.parts is None else (self.parts.fingerprint, self.parts.dim)

    def read(self, texts: Sequence[str], side: Side, prompt: str) -> Vectors:
        """Returns unit vectors (texts, dim) of texts with the prompt before each."""
        prompted = [prompt + text for text in texts] if prompt else texts
        if self.parts is None:
            return self.encode(prompted)
        return self.parts.join(self.parts.encode(prompted, prompt), side)


@dataclass(frozen=True, slots=True)
class Parts:
    """The vectors of two encoders in one row, which `join` makes one vector: they are read once for any share."""

    fingerprint: str
    dim: int
    encode: Callable[[Sequence[str], str], Vectors]
    """Takes texts and the prompt that they begin with, which the second encoder does not read."""
    join: Callable[[Vectors, Side], Vectors]


@dataclass(frozen=True, slots=True)
class Address:
    """A folder or a service, and how to use it where it does not say so itself."""

    place: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str, known: Sequence[str]) -> Address:
        """Parses `PLACE,name=value,…`; a comma that no known name follows belongs to the place."""
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

    With a precision, the folder is read as the indexer reads an LLM's, and two joined encoders with another `share`.
    """
    address = Address.parse(text, OPTIONS)
    folder, options = Path(address.place), address.options
    if not folder.is_dir():
        raise BadEncoder(f"{folder}: no such encoder folder")
    described = (folder / SPEC_FILE).is_file()
    if described and (POOLING in options or MAX_LENGTH in options):
        raise BadEncoder(f"{text}: the folder's {SPEC_FILE} says its {POOLING} and {MAX_LENGTH}; leave them out")
    if described and EncoderSpec.load(folder).address is not None:
        if options:
            raise BadEncoder(f"{text}: the encoder is run by a server; leave the options out")
        return _open_address(folder)
    device = _choice(options, DEVICE, DEVICES)
    if PRECISION in options:
        if DTYPE in options or VARIANT in options:
            raise BadEncoder(f"{text}: a {PRECISION} says in what numbers to compute; leave {DTYPE} and {VARIANT} out")
        return _open_packed(folder, options)
    if SHARE in options:
        raise BadEncoder(f"{text}: two joined encoders have a {SHARE}, and only with a {PRECISION}")
    if described and has_graph(folder) and DTYPE not in options:
        variant = Variant(_choice(options, VARIANT, list(Variant))) if VARIANT in options else None
        onnx = OnnxEncoder.load(folder, variant, device=device)
        name = f"{folder.resolve().name} ({onnx.variant})"
        tokenise = onnx.tokenizer.batch
        return OpenEncoder(name, onnx.spec, onnx.fingerprint, None, lambda texts: onnx.encode_bulk(tokenise(texts)))
    if VARIANT in options:
        raise BadEncoder(
            f"{text}: there is no ONNX graph to choose from (a {DTYPE} asks for torch); leave {VARIANT} out"
        )
    return _open_torch(folder, options, device)


class Reranker(Protocol):
    """Scores pairs of a query and a document: a cross-encoder."""

    @property
    def tokenizer(self) -> PairTokenizer: ...
    def score(self, pairs: Sequence[Tokens]) -> Vectors:
        """Returns a score for each pair, the higher the better."""
        ...


def open_reranker(text: str) -> tuple[str, Reranker]:
    """Opens `FOLDER[,variant=fp32,…]` and gives it a name: by ONNX Runtime, or by torch if the folder has no graph."""
    address = Address.parse(text, (DEVICE, VARIANT))
    folder, options = Path(address.place), address.options
    if not folder.is_dir():
        raise BadEncoder(f"{folder}: no such reranker folder")
    device = _choice(options, DEVICE, DEVICES)
    if has_graph(folder):
        variant = Variant(_choice(options, VARIANT, list(Variant))) if VARIANT in options else None
        onnx = OnnxReranker.load(folder, variant, device=device)
        return f"{onnx.name} ({onnx.variant})", onnx
    if VARIANT in options:
        raise BadEncoder(f"{text}: there is no ONNX graph to choose from; leave {VARIANT} out")
    reranker: Reranker = import_module("models.encoder.torch_reranker").TorchReranker.load(folder).to(device)
    return folder.resolve().name, reranker


def _open_address(folder: Path) -> OpenEncoder:
    if (address := EncoderSpec.load(folder).address) is None or address.tells_sides_apart:
        raise BadEncoder(
            f"{folder}: the server is sent other fields for queries than for documents, which an evaluation cannot; "
            "evaluate a service of it (--service)"
        )
    server = import_module("models.encoder.address").AddressEncoder.load(folder)  # loads an HTTP client
    name = folder.resolve().name
    encode = server.encode_prompts
    return OpenEncoder(name, server.spec, server.fingerprint, None, lambda texts: encode(server.cut(texts), Side.QUERY))


def _open_torch(folder: Path, options: dict[str, str], device: str) -> OpenEncoder:
    if not (folder / CONFIG_FILE).is_file():
        raise BadEncoder(f"{folder} holds neither {SPEC_FILE} with an ONNX graph nor {CONFIG_FILE} with torch weights")
    dtype, name = _choice(options, DTYPE, DTYPES), folder.resolve().name
    # Imported by name: this module must not need torch.
    torch, torch_encoder = import_module("torch"), import_module("models.encoder.torch")
    spec = EncoderSpec.load(folder) if (folder / SPEC_FILE).is_file() else _inferred(folder, options)
    if device == "cuda" and not torch.cuda.is_available():
        raise BadEncoder(f"{DEVICE}={device}: torch sees no GPU here; leave it out")
    plain = spec.without_instructions()
    encoder = torch_encoder.TorchEncoder.load(folder, plain, dtype=getattr(torch, dtype)).to(device)
    # The spec, the arithmetic and the content of every file that decides about the vectors.
    facts = spec.model_dump(mode="json", include={"pooling", "dim", "max_length", "normalize"})
    paths = sorted({path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern)})
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}
    return OpenEncoder(
        name=name if dtype == DTYPES[0] else f"{name} ({dtype})",
        spec=spec,
        fingerprint=hashlib.sha256(json.dumps([facts, dtype, files], sort_keys=True).encode()).hexdigest()[:16],
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        encode=lambda texts: encoder.encode(texts, Side.DOCUMENT),
    )


def _open_packed(folder: Path, options: dict[str, str]) -> OpenEncoder:
    precision = Precision(_choice(options, PRECISION, list(Precision)))
    spec, name = EncoderSpec.load(folder), f"{folder.resolve().name} ({precision})"
    packed = import_module("models.encoder.packed.joined")
    encoder = packed.open_packed(folder, spec.without_instructions(), device=options.get(DEVICE), precision=precision)
    if spec.beside is None:
        if SHARE in options:
            raise BadEncoder(f"{folder}: only two joined encoders have a {SHARE}; leave it out")
        return OpenEncoder(name, spec, encoder.fingerprint, None, lambda texts: encoder.encode(texts, Side.DOCUMENT))
    share = _share(options[SHARE]) if SHARE in options else None
    other = "" if share is None else f" share {share:g}"
    parts = Parts(
        fingerprint=encoder.parts_fingerprint,
        dim=encoder.parts_dim,
        encode=lambda texts, prompt: encoder.parts(texts, Side.DOCUMENT, prompt),
        join=partial(encoder.joined, share=share),
    )
    return OpenEncoder(
        name=name + other,
        spec=spec,
        fingerprint=encoder.fingerprint + other,
        parameters=None,
        encode=lambda texts: parts.join(parts.encode(texts, ""), Side.DOCUMENT),
        parts=parts,
    )


def _share(text: str) -> float:
    """Returns a share between 0 and 1, both excluded: else one of two encoders would count for nothing."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise BadEncoder(f"{SHARE}={text}: give a number between 0 and 1")
    return value


def _inferred(folder: Path, options: dict[str, str]) -> EncoderSpec:
    given: dict[str, Any] = {}
    if POOLING in options:
        given[POOLING] = Pooling(_choice(options, POOLING, list(POOLINGS)))
    if MAX_LENGTH in options:
        if not options[MAX_LENGTH].isdecimal():
            raise BadEncoder(f"{MAX_LENGTH}={options[MAX_LENGTH]} is not a whole number")
        given[MAX_LENGTH] = int(options[MAX_LENGTH])
    infer_spec = import_module("models.encoder.folder").infer_spec
    spec: EncoderSpec = infer_spec(folder, space=folder.resolve().name, **given)
    return spec


def _choice(options: dict[str, str], name: str, known: Sequence[str]) -> str:
    """Returns the option's value, the first of `known` if it is not given."""
    value = options.get(name, known[0])
    if value not in known:
        raise BadEncoder(f"{name}={value}: choose from {', '.join(known)}")
    return value

"""Reads and writes `encoder.json`: everything about an encoder except its weights.

The file lies beside the weights, so that a mismatch is refused when the folder is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from models.errors import BadEncoder

SPEC_FILE = "encoder.json"
TOKENIZER_FILE = "tokenizer.json"
RERANKER_FILE = "reranker.json"
"""Describes a reranker as `encoder.json` does an encoder (`models.encoder.pairs`)."""
CANARIES_FILE = "canaries.json"
BESIDE = "beside"
JOIN_FILE = "join.safetensors"
DATA_SUFFIX = ".data"
"""Of the file with the weights of a graph that is too large for one file."""
NOT_IN_FINGERPRINT = {"parity", "sides", "checksums", "weights", "query_template", "address", "dense_trust"}
INSTRUCTION = "{instruction}"
TEMPLATE = INSTRUCTION + "\nQuery: "


class Pooling(StrEnum):
    """Which hidden states become the embedding. SERVER: an encoder behind an address, whose server decides."""

    CLS = "cls"
    EOS = "eos"
    MEAN = "mean"
    SERVER = "server"


POOLINGS = (Pooling.CLS, Pooling.EOS, Pooling.MEAN)
"""Those that are computed here."""

PACKED = (
    "bert", "xlm-roberta", "roberta", "modernbert", "gte", "qwen2", "qwen3", "llama", "mistral", "gemma2",
    "gemma3_text", "gpt_neox",
)  # fmt: skip
"""Architectures that torch encodes for an index (models.encoder.packed). Others need a graph."""


class Side(StrEnum):
    """What a text is to the search: a question, or something to be found."""

    QUERY = "query"
    DOCUMENT = "document"


class Variant(StrEnum):
    """The ONNX graphs an encoder folder may hold, by the numbers they compute in."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"

    @property
    def filename(self) -> str:
        return "model.onnx" if self is Variant.FP32 else f"model.{self.value}.onnx"


class Precision(StrEnum):
    """The numbers in which torch computes with an encoder's weights."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"


ADDRESS: Literal["address"] = "address"
Computed = Variant | Precision | Literal["address"]
"""What computes an encoder's vectors: a graph, torch in these numbers, or a server."""


class Address(BaseModel):
    """A server with OpenAI's embeddings API: `url` is the part before /embeddings, `model` its name for the encoder.

    `key_variable` names the environment variable that holds the key; the key itself is in no file. The fields are added
    to the body of requests for queries and for documents, for servers that tell the two apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Annotated[str, Field(min_length=1)]
    key_variable: str | None = None
    query_fields: dict[str, JsonValue] = {}
    document_fields: dict[str, JsonValue] = {}

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address; write it as https://host/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("the address must hold neither a key nor a query; name the key's variable instead")
        return url.rstrip("/").removesuffix("/embeddings")

    @field_validator("query_fields", "document_fields")
    @classmethod
    def _leaves_texts_alone(cls, fields: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted({"model", "input"} & fields.keys()):
            raise ValueError(f"{taken[0]} is part of every request and cannot be added to it")
        return fields

    def fields(self, side: Side) -> dict[str, JsonValue]:
        return self.query_fields if side is Side.QUERY else self.document_fields

    @property
    def tells_sides_apart(self) -> bool:
        """Returns whether the server gives one text two vectors, as a query and as a document."""
        return self.query_fields != self.document_fields


class Parity(BaseModel):
    """How close an exported graph came to the torch encoder on the check texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cosine: float
    top10_overlap: float
    texts: int


class Beside(BaseModel):
    """A second encoder in the folder `beside` reads documents, too, as they stand, without an instruction.

    Unit vectors of both stand side by side, weighted so that the second one's `share` of a cosine is this, and
    `join.safetensors` turns them into `EncoderSpec.dim` dimensions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: Annotated[float, Field(gt=0, lt=1)]
    native_dim: Annotated[int, Field(gt=0)]
    """Of the first encoder alone, as `dim`."""
    dim: Annotated[int, Field(gt=0)]
    pooling: Pooling
    """Of the second encoder, for an import of it (`care encoder import --beside`)."""


class EncoderSpec(BaseModel):
    """The content of `encoder.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    sides: Annotated[tuple[Side, ...], Field(min_length=1)]
    pooling: Pooling
    native_dim: Annotated[int, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    max_length: Annotated[int, Field(gt=2)]
    query_instruction: str = ""
    document_instruction: str = ""
    query_template: str = TEMPLATE
    """How an instruction that is given for a task is put before a query; must hold {instruction}."""
    normalize: bool = True
    space: Annotated[str, Field(min_length=1)]
    checksums: dict[str, str] = {}
    parity: dict[Variant, Parity] = {}
    weights: str | None = None
    """Names the trained weights that the folder's graphs were exported from."""
    dense_trust: float = 0.0
    """Raises the dense side's share in a hybrid search (models.fusion); fitted on development sets."""
    address: Address | None = None
    """The server that computes the vectors; None: the folder holds weights."""
    beside: Beside | None = None

    @model_validator(mode="after")
    def _dim_fits(self) -> EncoderSpec:
        if self.dim > self.native_dim:
            raise ValueError(f"dim {self.dim} is larger than native_dim {self.native_dim}")
        if INSTRUCTION not in self.query_template:
            raise ValueError(f"query_template {self.query_template!r} must hold {INSTRUCTION}")
        if (self.address is None) == (self.pooling is Pooling.SERVER):
            raise ValueError("pooling is server if the encoder has an address, and only then")
        return self

    @property
    def file(self) -> str:
        return SPEC_FILE

    @property
    def document_side(self) -> Side:
        """Returns the side by which this encoder reads documents: that of queries if it reads no other."""
        return Side.DOCUMENT if Side.DOCUMENT in self.sides else Side.QUERY

    def instruction(self, side: Side) -> str:
        return self.query_instruction if side is Side.QUERY else self.document_instruction

    def without_instructions(self) -> EncoderSpec:
        """Returns the spec of an encoder that reads texts as they stand."""
        return self.model_copy(update={"query_instruction": "", "document_instruction": ""})

    def prompt(self, instruction: str) -> str:
        """Returns the text before a query that has this instruction."""
        return self.query_template.replace(INSTRUCTION, instruction) if instruction else ""

    def fingerprint(self, *weights: str, computed: str | None = None) -> str:
        """Names the function document → embedding computed with the `weights` files of this folder.

        `computed` says how, except for ONNX graphs. The query instruction counts only if documents are read as queries.
        """
        facts = self.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT | self._unset)
        if self.address is not None:  # wherever the server runs
            facts["model"], facts["fields"] = self.address.model, self.address.fields(self.document_side)
        if self.document_side is Side.DOCUMENT:
            facts["query_instruction"] = ""
        facts["files"] = [self.checksums.get(name) for name in (*weights, TOKENIZER_FILE)]
        if computed is not None:
            facts["computed"] = computed
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def fingerprints(self) -> frozenset[str]:
        """Those of all graphs of the folder: one encoder, in whatever numbers it computes."""
        if self.address is not None:
            return frozenset({self.fingerprint(CANARIES_FILE)})
        return frozenset(self.fingerprint(each.filename) for each in Variant if each.filename in self.checksums)

    @property
    def identities(self) -> frozenset[str]:
        """Names of the encoder by its weights: of each graph, and of the trained weights, which all exports share.

        A snapshot lists those of the query encoders that may search it. They do not depend on instructions.
        """
        graphs = {variant.filename for variant in Variant}
        data = {name + DATA_SUFFIX for name in graphs}
        trained = {
            name: value for name, value in self.checksums.items() if name not in (*graphs, *data, TOKENIZER_FILE)
        }
        files = [value for name, value in self.checksums.items() if name in graphs]
        files += [name_of_weights(trained)] if trained else []
        files += [self.weights] if self.weights else []
        shared = [self.checksums.get(TOKENIZER_FILE), self.pooling, self.dim]
        return frozenset(hashlib.sha256(json.dumps([file, *shared]).encode()).hexdigest()[:16] for file in files)

    @property
    def _unset(self) -> set[str]:
        """Fields of few encoders, which the file and the fingerprint of others leave out."""
        return {name for name in ("address", "beside") if getattr(self, name) is None}

    def save(self, folder: Path) -> None:
        fields = self.model_dump(mode="json", exclude=self._unset)
        text = json.dumps(fields, ensure_ascii=False, indent=2) + "\n"
        (folder / SPEC_FILE).write_text(text, encoding="utf-8")
        share_weights(folder / SPEC_FILE)

    @classmethod
    def load(cls, folder: Path) -> EncoderSpec:
        path = folder / SPEC_FILE
        if (folder / RERANKER_FILE).is_file():
            raise BadEncoder(f"{folder} is a reranker and makes no vectors; serve it with CARE_RERANKER={folder}")
        if not path.is_file():
            raise BadEncoder(
                f"{folder} is not an encoder folder: {SPEC_FILE} is missing (care encoder import writes one)"
            )
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise BadEncoder(f"{path}: {fault(error)}") from error


def fault(error: ValidationError) -> str:
    """Returns the first field of a spec that is wrong, and how."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), message)))


def name_of_weights(checksums: Mapping[str, str]) -> str:
    """Makes one name for weights in several files from the checksum of each."""
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()


def share_weights(like: Path) -> None:
    """Gives the weights beside a file its rights: safetensors makes files that only their owner can read."""
    for path in like.parent.glob("*.safetensors"):
        path.chmod(like.stat().st_mode & 0o777)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Described(Protocol):
    """What `encoder.json` or `reranker.json` says of the files beside it."""

    @property
    def file(self) -> str:
        """The name of the JSON file itself."""
        ...

    @property
    def checksums(self) -> dict[str, str]: ...


def verify_graph(folder: Path, name: str, spec: Described) -> Path:
    """As `verify_file`, of a graph and of the file with its weights, if it has one."""
    if name + DATA_SUFFIX in spec.checksums:
        verify_file(folder, name + DATA_SUFFIX, spec)
    return verify_file(folder, name, spec)


def verify_file(folder: Path, name: str, spec: Described) -> Path:
    """Returns the path of a file of the folder, after its checksum was compared with the one in `encoder.json`."""
    path = folder / name
    if not path.is_file():
        raise BadEncoder(f"{folder}: {name} is missing")
    expected = spec.checksums.get(name)
    if expected is None:
        raise BadEncoder(f"{folder}: {spec.file} has no checksum for {name}")
    if sha256_of(path) != expected:
        raise BadEncoder(f"{folder}: {name} was altered: its checksum differs from {spec.file}")
    return path

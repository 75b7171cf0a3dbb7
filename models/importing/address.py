"""Writes the folder of an encoder behind an address; asks the server for its dimension and for the canaries.

Into a folder of the same encoder it can be written again, with another address or key: the canaries, and with them
the fingerprint, stay if the server still gives their vectors.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import JsonValue, ValidationError

from models.encoder.address import (
    CANARY_TEXTS,
    DECIMALS,
    OPENING_SECONDS,
    AddressEncoder,
    AddressReader,
    Asking,
    Canaries,
    Vectors,
    Wire,
)
from models.encoder.spec import (
    ADDRESS,
    CANARIES_FILE,
    SPEC_FILE,
    TOKENIZER_FILE,
    Address,
    EncoderSpec,
    Pooling,
    Side,
    fault,
    sha256_of,
)
from models.encoder.staging import staging
from models.encoder.tokenizer import Tokenizer
from models.errors import BadEncoder

MAX_LENGTH = 512
SIDES = (Side.QUERY, Side.DOCUMENT)


@dataclass(frozen=True, slots=True)
class Server:
    """Options for an encoder behind an address; `dim` None: all dimensions that the server gives."""

    url: str
    model: str
    space: str | None = None
    key_variable: str | None = None
    dim: int | None = None
    max_length: int = MAX_LENGTH
    query_instruction: str = ""
    document_instruction: str = ""
    query_fields: Mapping[str, JsonValue] = field(default_factory=dict)
    document_fields: Mapping[str, JsonValue] = field(default_factory=dict)
    tokenizer: Path | None = None


def import_address(server: Server, target: Path) -> float:
    """Writes `target` and returns the least cosine of the canaries, asked for a second time."""
    before = _same_encoder(target, server)
    try:
        address = Address.model_validate({name: getattr(server, name) for name in Address.model_fields})
    except ValidationError as error:
        raise BadEncoder(fault(error)) from error
    native_dim, vectors = _ask_canaries(address)
    with staging(target) as work:
        staged = work / "staged"
        staged.mkdir()
        if before is None:
            _canaries(address, vectors, server.dim or native_dim).save(staged)
        else:
            shutil.copyfile(target / CANARIES_FILE, staged / CANARIES_FILE)
        names = [CANARIES_FILE]
        if server.tokenizer is not None:
            Tokenizer.load(server.tokenizer, server.max_length)
            shutil.copyfile(server.tokenizer, staged / TOKENIZER_FILE)
            names.append(TOKENIZER_FILE)
        _spec(server, address, native_dim, {name: sha256_of(staged / name) for name in names}).save(staged)
        worst = AddressEncoder.load(staged).check()
        if before is not None:
            target.rename(work / "replaced")
        staged.rename(target)
    return worst


def _same_encoder(target: Path, server: Server) -> AddressReader | None:
    """Returns the folder of the same model that is there already, None if nothing is there."""
    if not target.exists():
        return None
    if (target / SPEC_FILE).is_file() and EncoderSpec.load(target).address is not None:
        before = AddressReader.open(target)
        if (before.address.model, before.spec.dim) == (server.model, server.dim or before.spec.native_dim):
            return before
    raise BadEncoder(f"{target} is there already and is another encoder; give another folder, or remove it first")


def _ask_canaries(address: Address) -> tuple[int, dict[Side, Vectors]]:
    """Returns the server's dimension, and its vectors of the canaries, each asked for alone."""
    asking = Asking(Wire(address, None, None))
    queries = documents = asking.all(CANARY_TEXTS, Side.QUERY, 1, OPENING_SECONDS)
    if address.tells_sides_apart:
        documents = asking.all(CANARY_TEXTS, Side.DOCUMENT, 1, OPENING_SECONDS)
    return queries.shape[1], {Side.QUERY: queries, Side.DOCUMENT: documents}


def _canaries(address: Address, vectors: Mapping[Side, Vectors], dim: int) -> Canaries:
    kept = {side: np.round(rows[:, :dim].astype(float), DECIMALS).tolist() for side, rows in vectors.items()}
    return Canaries(model=address.model, texts=CANARY_TEXTS, vectors=kept)


def _spec(server: Server, address: Address, native_dim: int, checksums: dict[str, str]) -> EncoderSpec:
    try:
        return EncoderSpec(
            architecture=ADDRESS,
            sides=SIDES,
            pooling=Pooling.SERVER,
            native_dim=native_dim,
            dim=server.dim or native_dim,
            max_length=server.max_length,
            query_instruction=server.query_instruction,
            document_instruction=server.document_instruction,
            space=server.space or server.model.rsplit("/", 1)[-1],
            checksums=checksums,
            address=address,
        )
    except ValidationError as error:
        raise BadEncoder(f"{server.url}: {fault(error)}") from error

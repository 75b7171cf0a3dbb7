"""An encoder behind an address: any server with OpenAI's embeddings API (vLLM, TEI, Infinity, Ollama, clouds).

The folder holds no weights but canaries: texts and the vectors that the server gave when the folder was written. A
server that gives others is refused, because its vectors would not compare with those of an index.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from models.encoder.spec import ADDRESS, CANARIES_FILE, Address, EncoderSpec, Side, fault, verify_file
from models.encoder.tokenizer import TextReader, Tokenizer, open_tokenizer
from models.endpoint import retry_after
from models.errors import BadEncoder, EncoderAway, EncoderMoved

Vectors = NDArray[np.float32]

CANARY_TEXTS = (
    "高血压",
    "孩子发烧三十九度，需要马上去医院吗？",
    "二甲双胍的常见不良反应为恶心、腹泻等胃肠道反应，严重肾功能不全者禁用。",
    "asthma",
    "Can ibuprofen be taken together with an ACE inhibitor?",
    "Iron deficiency is the most common cause of anaemia; a low ferritin proves it.",
)
# The least cosine of a canary. The same weights in other numbers (fp16, int8) stay above it; another model, or one that
# was fine-tuned further, does not.
FLOOR = 0.99
DECIMALS = 6

SHOWN = 200  # characters of a server's message

UNAUTHORISED, TOO_MUCH, BUSY = (401, 403), (400, 413, 422), 429


class Refused(BadEncoder):
    """A request that the server will not answer as it stands: too many texts, or too long a text."""


class Canaries(BaseModel):
    """The content of `canaries.json`: the vectors (texts, dim) that the server gave, without instructions.

    They are kept for each side, because the server may tell the two apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    texts: tuple[str, ...]
    vectors: Mapping[Side, tuple[tuple[float, ...], ...]]

    @classmethod
    def load(cls, folder: Path, spec: EncoderSpec) -> Canaries:
        path = verify_file(folder, CANARIES_FILE, spec)
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise BadEncoder(f"{path}: {fault(error)}; import the encoder again") from error

    def save(self, folder: Path) -> None:
        (folder / CANARIES_FILE).write_text(json.dumps(self.model_dump(mode="json"), ensure_ascii=False), "utf-8")

    def require(self, found: Vectors, side: Side, server: str) -> float:
        """The least cosine of the vectors, of the first texts, to those kept; raises EncoderMoved below the floor.

        `server` names the server in the message.
        """
        kept = np.array(self.vectors[side][: len(found)], np.float32)
        worst = -1.0
        if kept.shape == found.shape:
            worst = float(((kept * found).sum(axis=1) / np.linalg.norm(kept, axis=1)).min())
        if not worst >= FLOOR:
            raise EncoderMoved(
                f"{server} gives other vectors than when its encoder folder was written (cosine {worst:.3f} of a "
                f"canary, at least {FLOOR}): have it run the same model again, or import the new one into another "
                "folder (care encoder import) and build the collection with that"
            )
        return worst


class Prompt(NamedTuple):
    """A text as it is sent: with its instruction, cut to what the encoder reads, and its tokens, counted here."""

    text: str
    tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Wire:
    """What is sent to a server, and what its answers mean. Makes no calls."""

    address: Address
    native_dim: int | None
    """None: whatever the server gives."""
    dim: int | None

    def headers(self) -> dict[str, str]:
        name = self.address.key_variable
        if name is None:
            return {}
        key = os.environ.get(name, "").strip()
        if not (key and key.isascii() and key.isprintable()):
            raise BadEncoder(f"{self.address.url} needs a key: set the environment variable {name} to it")
        return {"Authorization": f"Bearer {key}"}

    @property
    def name(self) -> str:
        return f"{self.address.model} at {self.address.url}"

    @property
    def route(self) -> str:
        return f"{self.address.url}/embeddings"

    def body(self, prompts: Sequence[str], side: Side) -> dict[str, Any]:
        asked = {"model": self.address.model, "input": list(prompts), "encoding_format": "float"}
        return asked | self.address.fields(side)

    def vectors(self, response: httpx.Response, count: int) -> Vectors:
        """Unit vectors (count, dim) in the order asked.

        Raises EncoderAway for what may pass, Refused for the request, EncoderMoved for another dimension, and
        BadEncoder for an answer or a server that is not usable.
        """
        self._require_success(response)
        try:
            entries = response.json()["data"]
            places = [entry.get("index", place) for place, entry in enumerate(entries)]
            rows = [_numbers(entry["embedding"]) for entry in entries]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadEncoder(f"{self.route} does not answer with OpenAI's embeddings; is the address right?") from error
        if sorted(places) != list(range(count)):
            raise BadEncoder(f"{self.route} gave {len(rows)} vectors for {count} texts, or misnumbered them")
        if len(widths := {len(row) for row in rows}) != 1 or (self.native_dim or len(rows[0])) not in widths:
            given = " and ".join(map(str, sorted(widths)))
            raise EncoderMoved(
                f"{self.route}: {self.address.model} gives {given} dimensions instead of {self.native_dim}: the model "
                "on the server changed; import it into a new folder (care encoder import) and build again with that"
            )
        vectors = np.stack([rows[place] for place in np.argsort(places)])[:, : self.dim]
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not (np.isfinite(lengths) & (lengths > 0)).all():
            raise BadEncoder(f"{self.route}: {self.address.model} gave a vector that is zero or not finite")
        unit: Vectors = (vectors / lengths).astype(np.float32)
        return unit

    def _require_success(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.is_success:
            return
        if status in UNAUTHORISED:  # its message may repeat a part of the key
            name = self.address.key_variable
            cure = f"check the key in {name}" if name else "import it with --api-key-env VARIABLE"
            raise BadEncoder(f"{self.route} answers {status}: it takes no request without a valid key; {cure}")
        said = f"{self.route} answers {status}: {' '.join(response.text[:SHOWN].split())}"
        if status == BUSY or response.is_server_error:
            raise EncoderAway(said, retry_after(response.headers.get("retry-after", "")))
        if status in TOO_MUCH:
            raise Refused(f"{said}; if a text is too long, import the encoder with a smaller --max-length")
        raise BadEncoder(f"{said}; check the address and the name of the model")


def _numbers(embedding: object) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding, np.float32).reshape(-1)


class AddressReader(TextReader):
    """The folder of an encoder behind an address; calls no server."""

    def __init__(self, spec: EncoderSpec, tokenizer: Tokenizer, canaries: Canaries) -> None:
        super().__init__(spec, ADDRESS, CANARIES_FILE, tokenizer)
        assert spec.address is not None
        self.address = spec.address
        self.canaries = canaries
        self.wire = Wire(spec.address, spec.native_dim, spec.dim)
        self._special_tokens = len(tokenizer(""))

    @staticmethod
    def open(folder: Path, *, device: str = "cpu") -> AddressReader:
        spec = EncoderSpec.load(folder)
        if spec.address is None:
            raise BadEncoder(f"{folder} holds weights and has no address")
        return AddressReader(spec, open_tokenizer(folder, spec), Canaries.load(folder, spec))

    @property
    def checked_sides(self) -> tuple[Side, ...]:
        """The sides whose canaries must be asked for: one is enough if the server does not tell them apart."""
        return self.spec.sides if self.address.tells_sides_apart else self.spec.sides[:1]

    def prompts(self, texts: Sequence[str], side: Side) -> list[Prompt]:
        """What is sent of each text."""
        instruction = self.spec.instruction(side)
        return self.cut([instruction + text for text in texts])

    def cut(self, texts: Sequence[str]) -> list[Prompt]:
        """Texts cut to what the encoder reads: servers refuse those that are too long."""
        room, prompts = self.spec.max_length - self._special_tokens, []
        for text, tokens in zip(texts, self.tokenizer.batch(texts), strict=True):
            end = self.tokenizer.offsets(text)[room][0] if tokens.truncated else len(text)
            prompts.append(Prompt(text[:end], len(tokens), tokens.truncated))
        return prompts

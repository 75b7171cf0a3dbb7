"""Encoder client for any server with OpenAI's embeddings API (vLLM, TEI, Infinity, Ollama, clouds).

The folder holds no weights but canaries: texts and the vectors that the server gave when the folder was written. A
server that gives others is refused, because its vectors would not compare with those of an index. Builds ask in
batches, several requests at once, with retries.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from models.encoder.spec import ADDRESS, CANARIES_FILE, Address, EncoderSpec, Side, Variant, fault, verify_file
from models.encoder.tokenizer import TextReader, Tokenizer, open_tokenizer
from models.endpoint import retry_after, trusted
from models.errors import BadEncoder, EncoderAway, EncoderMoved

if TYPE_CHECKING:
    from models.encoder.onnx import OnnxEncoder

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
# Texts of one request: what TEI takes by default. Requests at once: enough that a server never waits for this side.
BATCH_TEXTS = 32
REQUESTS_AT_ONCE = 8
BULK_TEXTS = 1024
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
# How long a server may fail without one success before a build gives up; a short time when a folder is opened.
PATIENCE_SECONDS, OPENING_SECONDS = 300.0, 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
LONGEST_RETRY_AFTER_SECONDS = 600.0

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
        """Returns the least cosine of the first texts' vectors to those kept; raises EncoderMoved below the floor.

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
        """Returns unit vectors (count, dim) in the order asked.

        Raises EncoderAway for what may pass, Refused for the request, EncoderMoved for another dimension, and
        BadEncoder for an answer or a server that is not usable.
        """
        self._require_success(response)
        try:
            entries = response.json()["data"]
            stated = [entry.get("index") for entry in entries]
            places = [place if index is None else index for place, index in enumerate(stated)]
            rows = [_numbers(entry["embedding"]) for entry in entries]
            in_order = sorted(places)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BadEncoder(f"{self.route} does not answer with OpenAI's embeddings; is the address right?") from error
        if in_order != list(range(count)):
            raise BadEncoder(f"{self.route} gave {len(rows)} vectors for {count} texts, or misnumbered them")
        if len(widths := {len(row) for row in rows}) != 1 or (self.native_dim or len(rows[0])) not in widths:
            found = " and ".join(map(str, sorted(widths)))
            raise EncoderMoved(
                f"{self.route}: {self.address.model} gives {found} dimensions instead of {self.native_dim}: the model "
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
        problem = f"{self.route} answers {status}: {' '.join(response.text[:SHOWN].split())}"
        if status == BUSY or response.is_server_error:
            raise EncoderAway(problem, retry_after(response.headers.get("retry-after", "")))
        if status in TOO_MUCH:
            raise Refused(f"{problem}; if a text is too long, import the encoder with a smaller --max-length")
        raise BadEncoder(f"{problem}; check the address and the name of the model")


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
        """Returns what is sent of each text."""
        instruction = self.spec.instruction(side)
        return self.cut([instruction + text for text in texts])

    def cut(self, texts: Sequence[str]) -> list[Prompt]:
        """Cuts texts to what the encoder reads: servers refuse longer ones."""
        room, prompts = self.spec.max_length - self._special_tokens, []
        for text, tokens in zip(texts, self.tokenizer.batch(texts), strict=True):
            end = self.tokenizer.offsets(text)[room][0] if tokens.truncated else len(text)
            prompts.append(Prompt(text[:end], len(tokens), tokens.truncated))
        return prompts


class AddressEncoder(AddressReader):
    """An encoder behind an address, for builds and evaluations."""

    bulk_texts = BULK_TEXTS

    def __init__(self, spec: EncoderSpec, tokenizer: Tokenizer, canaries: Canaries, requests: int) -> None:
        super().__init__(spec, tokenizer, canaries)
        self._asking = Asking(self.wire, requests)

    @classmethod
    def load(cls, folder: Path, *, threads: int = 0) -> AddressEncoder:
        """Opens a folder and asks the server for the canaries; `threads` are requests at once, 0: by default."""
        reader = AddressReader.open(folder)
        encoder = cls(reader.spec, reader.tokenizer, reader.canaries, threads or REQUESTS_AT_ONCE)
        encoder.check()
        return encoder

    def check(self) -> float:
        """Returns the least cosine of a canary; raises EncoderMoved, EncoderAway or BadEncoder."""
        # Each alone: in a batch an encoder in int8 or bf16 may give slightly other vectors.
        texts = self.canaries.texts
        found = {side: self._asking.all(texts, side, 1, OPENING_SECONDS) for side in self.checked_sides}
        return min(self.canaries.require(vectors, side, self.wire.name) for side, vectors in found.items())

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Returns unit vectors (texts, dim) in order; raises EncoderAway once the server has failed for too long."""
        return self.encode_prompts(self.prompts(texts, side), side)

    def encode_prompts(self, prompts: Sequence[Prompt], side: Side) -> Vectors:
        """As `encode`, of texts that were cut; no instruction is added."""
        order = sorted(range(len(prompts)), key=lambda row: prompts[row].tokens, reverse=True)
        vectors = np.empty((len(prompts), self.spec.dim), np.float32)
        vectors[order] = self._asking.all([prompts[row].text for row in order], side, BATCH_TEXTS, PATIENCE_SECONDS)
        if len(prompts) > BATCH_TEXTS:  # a shard: a server may be replaced in the middle of a build
            canary = self._asking.all(self.canaries.texts[:1], side, 1, PATIENCE_SECONDS)
            self.canaries.require(canary, side, self.wire.name)
        return vectors


class Asking:
    """Asks a server for the vectors of many prompts, several requests at a time."""

    def __init__(self, wire: Wire, requests: int = REQUESTS_AT_ONCE) -> None:
        self._wire = wire
        self._requests = requests
        self._most = BATCH_TEXTS  # texts of a request; less once the server refused as many

    def all(self, prompts: Sequence[str], side: Side, batch: int, patience_seconds: float) -> Vectors:
        """Returns unit vectors (prompts, dim); `batch` of them are asked for together."""
        size = min(batch, self._most)
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        with httpx.Client(headers=self._wire.headers(), timeout=timeout, verify=trusted()) as client:
            call = _Call(self._wire, client, side, patience_seconds)
            pool = ThreadPoolExecutor(min(self._requests, len(batches)), "care-address")
            try:
                return np.concatenate(list(pool.map(call.batch, batches)))
            finally:  # after a failure or a signal no thread asks again
                call.stopped.set()
                pool.shutdown(cancel_futures=True)
                self._most = min(self._most, call.most)


class _Call:
    """The requests for the texts of one call; its threads share when to ask again, and for how long it has failed."""

    def __init__(self, wire: Wire, client: httpx.Client, side: Side, patience_seconds: float) -> None:
        self.stopped = threading.Event()
        self.most = BATCH_TEXTS
        self._wire, self._client, self._side, self._patience_seconds = wire, client, side, patience_seconds
        self._lock = threading.Lock()
        self._resume = self._waited = 0.0
        self._failing_since: float | None = None

    def batch(self, prompts: Sequence[str]) -> Vectors:
        """Returns the vectors of one batch: asked again after failures, in halves if it is too much for the server."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            while not self.stopped.is_set() and (left := self._resume - time.monotonic()) > 0:
                self.stopped.wait(left)
            try:
                vectors = self._ask(prompts)
            except Refused:
                if len(prompts) == 1:
                    raise
                return self._halves(prompts)
            except EncoderAway as error:
                self._delay(error, pause)
                if isinstance(error, _TimedOut) and len(prompts) > 1:
                    return self._halves(prompts)
            else:
                with self._lock:
                    self._failing_since, self._waited = None, 0.0
                return vectors
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _ask(self, prompts: Sequence[str]) -> Vectors:
        route = self._wire.route
        try:
            response = self._client.post(route, json=self._wire.body(prompts, self._side))
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise _TimedOut(f"{route} gave no answer within {ANSWER_SECONDS:.0f} s") from error
        except httpx.RequestError as error:
            raise EncoderAway(f"{route} does not answer ({type(error).__name__})") from error
        return self._wire.vectors(response, len(prompts))

    def _halves(self, prompts: Sequence[str]) -> Vectors:
        half = (len(prompts) + 1) // 2
        vectors = np.concatenate([self.batch(part) for part in (prompts[:half], prompts[half:])])
        self.most = min(self.most, half)  # each half was taken, so it was their number that was refused
        return vectors

    def _delay(self, error: EncoderAway, pause: float) -> None:
        """Delays every request, by what the server asked for if it did; raises once patience is over.

        Waiting because the server asked for it costs no patience.
        """
        now, asked = time.monotonic(), error.expected_seconds
        with self._lock:
            if self._failing_since is None:
                self._failing_since = now
            resume = now + (asked or pause)
            if asked and resume > self._resume:
                self._waited += resume - max(now, self._resume)
            self._resume = max(self._resume, resume)
            spent = now - self._failing_since - self._waited
        if self.stopped.is_set() or asked > LONGEST_RETRY_AFTER_SECONDS or spent >= self._patience_seconds:
            raise EncoderAway(
                f"{error}; see that the server runs, then run the same command again: what is encoded is kept"
            ) from error


class _TimedOut(EncoderAway):
    """A request that the server took but did not answer in time."""


def load_encoder(
    folder: Path, variant: Variant | None = None, *, device: str = "cpu", threads: int = 0
) -> OnnxEncoder | AddressEncoder:
    """Opens any encoder folder that needs no torch: behind an address, or with a graph for ONNX Runtime."""
    if EncoderSpec.load(folder).address is not None:
        return AddressEncoder.load(folder, threads=threads)
    from models.encoder.onnx import OnnxEncoder  # loads ONNX Runtime

    return OnnxEncoder.load(folder, variant, device=device, threads=threads)

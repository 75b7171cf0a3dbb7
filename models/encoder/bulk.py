"""Encodes any number of texts by an encoder's server: in batches, several requests at once, with retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np

from models.encoder.address import AddressReader, Canaries, Prompt, Refused, Vectors, Wire
from models.encoder.spec import EncoderSpec, Side, Variant
from models.encoder.tokenizer import Tokenizer
from models.errors import EncoderAway

if TYPE_CHECKING:
    from models.encoder.onnx import OnnxEncoder

# Texts of one request: what TEI takes by default. Requests at once: enough that a server never waits for this side.
BATCH_TEXTS = 32
REQUESTS_AT_ONCE = 8
BULK_TEXTS = 1024
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
# How long a server may fail without one success before a build gives up; a short time when a folder is opened.
PATIENCE_SECONDS, OPENING_SECONDS = 300.0, 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
LONGEST_RETRY_AFTER_SECONDS = 600.0


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
        """The least cosine of a canary; raises EncoderMoved, EncoderAway or BadEncoder."""
        # Each alone: in a batch an encoder in int8 or bf16 may give slightly other vectors.
        texts = self.canaries.texts
        found = {side: self._asking.all(texts, side, 1, OPENING_SECONDS) for side in self.checked_sides}
        return min(self.canaries.require(vectors, side, self.wire.name) for side, vectors in found.items())

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Unit vectors (texts, dim) in the order given; raises EncoderAway once the server has failed for too long."""
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
        """Unit vectors (prompts, dim); `batch` of them are asked for together."""
        size = min(batch, self._most)
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        with httpx.Client(headers=self._wire.headers(), timeout=timeout) as client:
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
        """The vectors of one batch: asked again after failures, in halves if it is too much for the server."""
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

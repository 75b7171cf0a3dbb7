"""Main loop of the engine process: reads requests of all workers, computes them in batches, sends responses.

One thread, without timers: while a batch is computed the sockets fill, and what they hold by then is the next batch.
A lone query starts at once, and under load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Protocol, cast

import numpy as np

from indexer.errors import DatabaseAway
from indexer.store.collection import Collection
from models.encoder.spec import Side
from models.encoder.tokenizer import flatten
from models.errors import BadEncoder, CareError
from service.engine.batches import SLICE_SECONDS, CostModel, Lanes
from service.engine.device import Device, GraphReranker, OpenServing, compute_batch, open_encoder, searched_by
from service.engine.jobs import Request, Response, Status
from service.engine.queue import Limits, OnBatch
from service.engine.remote import frames
from service.engine.remote.frames import BadFrame, FrameReader, Kind
from service.serving.serving import Serving, require_query_encoder
from service.settings import Settings

logger = logging.getLogger(__name__)


class HasFileno(Protocol):
    """The pipe to the supervisor, or anything else that can be watched for its end."""

    def fileno(self) -> int: ...


CHECK_QUERY = "ready"
MOST_UNREAD_BYTES = 64 * 1024 * 1024  # a worker that leaves more unread is stuck; its connection is closed

Name = tuple[str, str, str]
"""The name of a `Serving`."""


class OpenServings:
    """The servings by handle: each is opened once for all workers, in a thread, and closed when no worker holds it."""

    def __init__(self, settings: Settings, device: Device) -> None:
        self._settings = settings
        self._device = device
        self._opener = ThreadPoolExecutor(1, "care-open")
        self._open_vectors = searched_by(device, settings.database)
        self._encoder = open_encoder(device, require_query_encoder(settings.encoder))
        self._reranker = self._load_reranker()
        self._held: dict[int, OpenServing] = {}
        self._handles = 0

    @property
    def newest(self) -> OpenServing | None:
        return self._held[max(self._held)] if self._held else None

    def get(self, handle: int) -> OpenServing | None:
        return self._held.get(handle)

    def find(self, name: Name) -> OpenServing | None:
        for held in self._held.values():
            if held.serving.name == name:
                return held
        return None

    def open(self, name: Name) -> Future[OpenServing]:
        """Begins to open a serving; the caller passes the result to `put`."""
        return self._opener.submit(self._open, *name)

    def put(self, opened: OpenServing) -> None:
        self._encoder, self._reranker = opened.encoder, opened.reranker
        self._held[opened.handle] = opened
        self._close_unheld()

    def release(self, handle: int) -> None:
        if (held := self._held.get(handle)) is not None:
            held.holders -= 1
            self._close_unheld()

    def close(self) -> None:
        self._opener.shutdown(wait=False, cancel_futures=True)

    def _close_unheld(self) -> None:
        # The newest stays without holders: if all workers died, the next ones will open it again.
        newest = max(self._held, default=0)
        for handle in [number for number, held in self._held.items() if held.holders <= 0 and number != newest]:
            logger.info("snapshot %s is let go", self._held.pop(handle).serving.version)

    def _open(self, version: str, fingerprint: str, of_reranker: str) -> OpenServing:
        settings, encoder, reranker = self._settings, self._encoder, self._reranker
        if encoder.reader.fingerprint != fingerprint:
            encoder = open_encoder(self._device, require_query_encoder(settings.encoder))
        if reranker is not None and reranker.reader.fingerprint != of_reranker:
            reranker = self._load_reranker()
        pairs = None if reranker is None else reranker.reader
        folder = Collection(settings.collection).folder(version)
        serving = Serving.open(folder, encoder.reader, pairs, verify=settings.verify)
        if serving.name != (version, fingerprint, of_reranker):
            changed = settings.encoder if encoder.reader.fingerprint != fingerprint else settings.reranker
            raise BadEncoder(f"{changed} changed while it was opened; reload once more")
        self._handles += 1
        vectors = self._open_vectors(serving.snapshot)
        return OpenServing(serving, encoder, vectors, self._handles, reranker=reranker)

    def _load_reranker(self) -> GraphReranker | None:
        folder = self._settings.reranker
        return None if folder is None else self._device.load_reranker(folder)


class Connection(asyncio.Protocol):
    """A worker's connection, with the handles of the servings that the worker holds."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._reader = FrameReader()
        self.handles: list[int] = []
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._server.receive(self, body)
        except BadFrame as error:
            logger.warning("a worker's connection is closed: %s", error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        if self.is_open:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
                logger.warning("a worker that does not read its answers is cut off")
                self.close()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._transport.abort()
            self._server.disconnected(self)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue. Size and length are read often, so they are computed once."""

    connection: Connection
    request: Request
    serving: OpenServing
    size: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.request.load
        self.length = max(self.request.lengths.tolist(), default=0)

    def is_wanted(self, now: float) -> bool:
        return self.connection.is_open and self.request.deadline > now


class EngineServer:
    """Serves the workers that connect to its listener, until `end`, or until supervisor and workers are gone."""

    def __init__(self, listener: socket.socket, limits: Limits, on_batch: OnBatch) -> None:
        self.connections: set[Connection] = set()
        self._listener = listener
        self._on_batch = on_batch
        self._cost = CostModel()
        self._lanes: Lanes[QueuedRequest] = Lanes(limits.batch_queries, limits.batch_tokens)
        self._openings: dict[Name, list[tuple[Connection, int]]] = {}
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = self._alone = False

    def end(self) -> None:
        """Ends `serve` after the current batch; may be called from any thread and from a signal handler."""
        self._ending = True
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def serve(self, servings: OpenServings, supervisor: HasFileno | None = None) -> None:
        """Runs the loop; `supervisor` becomes readable when the supervisor ends."""
        self._servings = servings
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(supervisor))

    async def _serve(self, supervisor: HasFileno | None) -> None:
        self._loop.set_exception_handler(_log_error)
        if supervisor is not None:
            self._loop.add_reader(supervisor, self._lose_supervisor, supervisor)
        server = await self._loop.create_unix_server(lambda: Connection(self), sock=self._listener)
        try:
            while not self._ending and (self.connections or not self._alone):
                if not len(self._lanes):
                    await self._changed.wait()
                self._changed.clear()
                self._run_batch()
                # Twice: the loop calls this task before it handles what the first pause let arrive.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        finally:
            # The loop accepts in tasks of its own; one that runs when the server closes leaves its socket open.
            while accepting := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(accepting)
            server.close()
            for connection in list(self.connections):
                connection.close()

    def _lose_supervisor(self, supervisor: HasFileno) -> None:
        self._loop.remove_reader(supervisor)
        self._alone = True
        self._changed.set()

    def disconnected(self, connection: Connection) -> None:
        self.connections.discard(connection)
        for handle in connection.handles:
            self._servings.release(handle)
        self._changed.set()

    def receive(self, connection: Connection, body: memoryview) -> None:
        self._changed.set()
        kind = frames.kind_of(body)
        if kind is Kind.REQUEST:
            request = frames.read_request(body)
            held = self._servings.get(request.handle)
            if held is None:
                connection.send(frames.write_response(Response(request.number, Status.UNKNOWN_SERVING)))
            else:
                self._lanes.add([QueuedRequest(connection, request, held)], bulk=request.bulk)
            return
        number, facts = frames.read_control(body)
        if kind is Kind.OPEN:
            self._open(connection, number, facts)
        elif kind is Kind.RELEASE and facts in connection.handles:
            connection.handles.remove(facts)
            self._servings.release(facts)
        elif kind is Kind.CHECK:
            self._check(connection, number)

    def _check(self, connection: Connection, number: int) -> None:
        """Runs a real query through the newest serving, ahead of the queue; without a serving answers at once."""
        held = self._servings.newest
        if held is None:
            connection.send(frames.write_response(Response(number, Status.DONE)))
            return
        reader, request = held.encoder.reader, Request(number, held.handle, k=1)
        if reader.spec.address is None:
            request.ids, request.lengths = flatten(reader.tokenize([CHECK_QUERY], Side.QUERY))
        else:  # any vector: the encoder's server is not this process's concern
            request.vectors = np.eye(1, reader.spec.dim, dtype=np.float32)
        self._lanes.add([QueuedRequest(connection, request, held)], first=True)

    def _open(self, connection: Connection, number: int, facts: object) -> None:
        if not isinstance(facts, list) or len(facts) != 3:
            raise BadFrame("a serving is named by a version and two fingerprints")
        name = facts[0], facts[1], facts[2]
        if (held := self._servings.find(name)) is not None:
            self._grant(connection, number, held)
            return
        if name not in self._openings:
            self._openings[name] = []
            opening = asyncio.wrap_future(self._servings.open(name), loop=self._loop)
            opening.add_done_callback(partial(self._opened, name))
        self._openings[name].append((connection, number))

    def _opened(self, name: Name, opening: asyncio.Future[OpenServing]) -> None:
        """Grants or refuses a serving when its opening has ended."""
        if opening.cancelled():
            return
        error = opening.exception()
        if error is None:
            self._servings.put(opening.result())
        elif not isinstance(error, CareError):
            logger.error("a serving could not be opened", exc_info=error)
        for connection, number in self._openings.pop(name):
            if error is None:
                self._grant(connection, number, opening.result())
            else:
                reason = (type(error).__name__, str(error))
                connection.send(frames.write_control(Kind.REFUSED, number, reason))

    def _grant(self, connection: Connection, number: int, held: OpenServing) -> None:
        if connection.is_open:
            held.holders += 1
            connection.handles.append(held.handle)
            connection.send(frames.write_control(Kind.OPENED, number, held.handle))

    def _run_batch(self) -> None:
        batch, dropped = self._lanes.take(monotonic(), self._cost.queries(SLICE_SECONDS))
        for late in dropped:
            late.connection.send(frames.write_response(Response(late.request.number, Status.EXPIRED)))
        if not batch:
            return
        began = perf_counter()
        responses = self._compute(batch)
        size, seconds = sum(queued.size for queued in batch), perf_counter() - began
        self._cost.observe(size, seconds)
        written: defaultdict[Connection, list[bytes]] = defaultdict(list)
        for queued, response in zip(batch, responses, strict=True):
            written[queued.connection].append(frames.write_response(response))
        for connection, parts in written.items():
            connection.send(b"".join(parts))
        tokens = sum(len(queued.request.ids) for queued in batch)
        self._on_batch(size, tokens, seconds, len(self._lanes))

    def _compute(self, batch: Sequence[QueuedRequest]) -> list[Response]:
        try:
            return compute_batch(batch[0].serving, [queued.request for queued in batch], len(self._lanes))
        except DatabaseAway:
            return [Response(queued.request.number, Status.DATABASE_AWAY) for queued in batch]
        except Exception as error:
            unexpected = not isinstance(error, CareError)
            logger.error("a batch of %d requests failed: %s", len(batch), error, exc_info=unexpected)
        if len(batch) == 1:
            return [Response(batch[0].request.number, Status.FAILED)]
        # One by one, so that only the request that causes the failure fails.
        return [self._compute([queued])[0] for queued in batch]


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error of the event loop, which accepts again a second after it ran out of files."""
    if "accept" in context["message"]:
        error = context["exception"]
        logger.error("a worker cannot be accepted (%s); raise the limit of open files (ulimit -n)", error)
    else:
        loop.default_exception_handler(context)

"""The engine process's loop: reads requests of all workers, computes them in batches on the device, answers.

One thread, without timers: while a batch is computed the sockets fill, and what they hold by then is the next batch.
A lone query starts at once, and under load batches form by themselves.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from indexer.store import Collection, DatabaseAway
from models.errors import BadEncoder, CareError
from models.spec import Side
from models.tokenizer import flatten
from service.engine.compute import OpenServing, Request, Response, Status, compute_batch
from service.engine.device import Device, searched_by
from service.engine.queue import SLICE_SECONDS, CostModel, Lanes, Limits, OnBatch
from service.engine.remote import frames
from service.engine.remote.frames import READ_BYTES, BadFrame, FrameReader, Kind
from service.serving import Serving, require_query_encoder
from service.settings import Settings

if TYPE_CHECKING:
    from _typeshed import HasFileno

logger = logging.getLogger(__name__)

CHECK_QUERY = "ready"
MOST_UNREAD_BYTES = 64 * 1024 * 1024  # a worker that leaves more unread is stuck; its connection is closed
ACCEPT_SECONDS = 1.0  # pause before accepting again while the process is out of files


Name = tuple[str, str]
"""A snapshot's version and an encoder's fingerprint."""


class OpenServings:
    """The servings by handle: each is opened once for all workers, in a thread, and closed when no worker holds it."""

    def __init__(self, settings: Settings, device: Device) -> None:
        self._settings = settings
        self._device = device
        self._opener = ThreadPoolExecutor(1, "care-open")
        self._open_vectors = searched_by(device, settings.database)
        self._encoder = device.load_encoder(require_query_encoder(settings.encoder))
        self._held: dict[int, OpenServing] = {}
        self._handles = 0

    @property
    def newest(self) -> OpenServing | None:
        return self._held[max(self._held)] if self._held else None

    def get(self, handle: int) -> OpenServing | None:
        return self._held.get(handle)

    def find(self, name: Name) -> OpenServing | None:
        for held in self._held.values():
            if (held.serving.version, held.serving.encoder.fingerprint) == name:
                return held
        return None

    def open(self, name: Name) -> Future[OpenServing]:
        """Begins to open a serving; the caller passes the result to `put`."""
        return self._opener.submit(self._open, *name)

    def put(self, opened: OpenServing) -> None:
        self._encoder = opened.encoder
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

    def _open(self, version: str, fingerprint: str) -> OpenServing:
        settings, encoder = self._settings, self._encoder
        if encoder.reader.fingerprint != fingerprint:
            encoder = self._device.load_encoder(require_query_encoder(settings.encoder))
        if encoder.reader.fingerprint != fingerprint:
            raise BadEncoder(f"{settings.encoder} changed while it was opened; reload once more")
        folder = Collection(settings.collection).folder(version)
        serving = Serving.open(folder, encoder.reader, verify=settings.verify)
        self._handles += 1
        return OpenServing(serving, encoder, self._open_vectors(serving.snapshot), self._handles)


@dataclass(slots=True, eq=False)
class Connection:
    """A worker's connection: received parts of frames, bytes to send, and the servings that the worker holds."""

    peer: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    handles: list[int] = field(default_factory=list)
    is_open: bool = True


class Connections:
    """Accepts workers and exchanges frames; only `poll` blocks. `on_body` gets each frame's body."""

    def __init__(
        self,
        listener: socket.socket,
        on_body: Callable[[Connection, memoryview], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        self._on_body = on_body
        self._on_close = on_close
        self.connections: set[Connection] = set()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._accept_again: float | None = None
        for end in (listener, self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda woken: woken.recv(READ_BYTES))

    def watch(self, source: HasFileno, on_readable: Callable[[], None]) -> None:
        """Calls `on_readable` once, when the source is readable."""

        def call(readable: HasFileno) -> None:
            self._selector.unregister(readable)
            on_readable()

        self._selector.register(source, selectors.EVENT_READ, call)

    def wake(self) -> None:
        """Makes `poll` return; may be called from any thread and from a signal handler."""
        with contextlib.suppress(OSError):  # closed, or awake already: the socket is full
            self._waker.send(b"\0")

    def poll(self, *, wait: bool) -> None:
        """Handles what has arrived; if `wait`, waits until something does."""
        seconds = None if wait else 0.0
        if self._accept_again is not None:
            pause = max(0.0, self._accept_again - monotonic())
            seconds = pause if wait else 0.0
            if not pause:
                self._accept_again = None
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for key, events in self._selector.select(seconds):
            if isinstance(key.data, Connection):
                self._exchange(key.data, events)
            else:
                key.data(key.fileobj)

    def send(self, connection: Connection, data: bytes) -> None:
        """Sends what the socket takes now, and keeps the rest for later."""
        if not connection.is_open:
            return
        waited = bool(connection.unsent)
        connection.unsent += data
        try:
            del connection.unsent[: connection.peer.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if len(connection.unsent) > MOST_UNREAD_BYTES:
            logger.warning("a worker that does not read its answers is cut off")
            self._close(connection)
        elif waited != bool(connection.unsent):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.peer, events, connection)

    def close(self) -> None:
        for connection in list(self.connections):
            self._close(connection)
        for resource in (self._selector, self._waker, self._woken):
            resource.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # the worker has left already
            return
        except OSError as error:
            # The connection stays in the listener's queue, which would wake every poll until then.
            logger.error("a worker cannot be accepted (%s); raise the limit of open files (ulimit -n)", error)
            self._selector.unregister(listener)
            self._accept_again = monotonic() + ACCEPT_SECONDS
            return
        peer.setblocking(False)
        connection = Connection(peer)
        self.connections.add(connection)
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _exchange(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self.send(connection, b"")
            if events & selectors.EVENT_READ:
                data = connection.peer.recv(READ_BYTES)
                for body in connection.reader.feed(data):
                    self._on_body(connection, body)
                if not data:
                    self._close(connection)
        except BlockingIOError:
            pass
        except ConnectionError:  # the worker ended before it read all that was sent
            self._close(connection)
        except (OSError, BadFrame) as error:
            logger.warning("a worker's connection is closed: %s", error)
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection.is_open:
            connection.is_open = False
            self.connections.discard(connection)
            self._selector.unregister(connection.peer)
            connection.peer.close()
            self._on_close(connection)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue. Size and length are read often, so they are computed once."""

    connection: Connection
    request: Request
    serving: OpenServing
    size: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.request.size
        self.length = max(self.request.lengths.tolist(), default=0)

    def is_wanted(self, now: float) -> bool:
        return self.connection.is_open and self.request.deadline > now


class EngineServer:
    """Serves the workers that connect to its listener, until `end`, or until supervisor and workers are gone."""

    def __init__(self, listener: socket.socket, limits: Limits, on_batch: OnBatch) -> None:
        self._on_batch = on_batch
        self._cost = CostModel()
        self._lanes: Lanes[QueuedRequest] = Lanes(limits.batch_queries, limits.batch_tokens)
        self._connections = Connections(listener, self._receive, self._release_all)
        self._openings: dict[Name, tuple[Future[OpenServing], list[tuple[Connection, int]]]] = {}
        self._ending = False
        self._alone = threading.Event()

    def end(self) -> None:
        """Ends `serve` after the current batch; may be called from any thread and from a signal handler."""
        self._ending = True
        self._connections.wake()

    def end_with(self, supervisor: HasFileno) -> None:
        """Ends `serve` once the supervisor is gone and no worker is left."""

        self._connections.watch(supervisor, self._alone.set)

    def serve(self, servings: OpenServings) -> None:
        self._servings = servings
        try:
            while not self._ending and (self._connections.connections or not self._alone.is_set()):
                self._connections.poll(wait=not len(self._lanes))
                self._answer_openings()
                self._run_batch()
        finally:
            self._connections.close()

    def _release_all(self, connection: Connection) -> None:
        for handle in connection.handles:
            self._servings.release(handle)

    def _receive(self, connection: Connection, body: memoryview) -> None:
        kind = frames.kind_of(body)
        if kind is Kind.REQUEST:
            request = frames.read_request(body)
            held = self._servings.get(request.handle)
            if held is None:
                self._respond(connection, Response(request.number, Status.UNKNOWN_SERVING))
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
            self._respond(connection, Response(number, Status.DONE))
            return
        ids, lengths = flatten(held.encoder.reader.tokenize([CHECK_QUERY], Side.QUERY))
        request = Request(number, held.handle, k=1, ids=ids, lengths=lengths)
        self._lanes.add([QueuedRequest(connection, request, held)], first=True)

    def _open(self, connection: Connection, number: int, facts: object) -> None:
        if not isinstance(facts, list) or len(facts) != 2:
            raise BadFrame("a serving is named by a version and a fingerprint")
        name = facts[0], facts[1]
        if (held := self._servings.find(name)) is not None:
            self._grant(connection, number, held)
            return
        if name not in self._openings:
            self._openings[name] = self._servings.open(name), []
            self._openings[name][0].add_done_callback(lambda _: self._connections.wake())
        self._openings[name][1].append((connection, number))

    def _answer_openings(self) -> None:
        """Grants or refuses the servings whose opening has ended."""
        for name in [name for name, (opening, _) in self._openings.items() if opening.done()]:
            opening, waiters = self._openings.pop(name)
            error = opening.exception()
            if error is None:
                self._servings.put(opening.result())
            elif not isinstance(error, CareError):
                logger.error("a serving could not be opened", exc_info=error)
            for connection, number in waiters:
                if error is None:
                    self._grant(connection, number, opening.result())
                else:
                    reason = (type(error).__name__, str(error))
                    self._connections.send(connection, frames.write_control(Kind.REFUSED, number, reason))

    def _grant(self, connection: Connection, number: int, held: OpenServing) -> None:
        if connection.is_open:
            held.holders += 1
            connection.handles.append(held.handle)
            self._connections.send(connection, frames.write_control(Kind.OPENED, number, held.handle))

    def _run_batch(self) -> None:
        batch, dropped = self._lanes.take(monotonic(), self._cost.queries(SLICE_SECONDS))
        for late in dropped:
            self._respond(late.connection, Response(late.request.number, Status.EXPIRED))
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
            self._connections.send(connection, b"".join(parts))
        self._on_batch(size, seconds, len(self._lanes))

    def _compute(self, batch: Sequence[QueuedRequest]) -> list[Response]:
        try:
            return compute_batch(batch[0].serving, [queued.request for queued in batch], len(self._lanes))
        except DatabaseAway:
            return [Response(queued.request.number, Status.DATABASE_AWAY) for queued in batch]
        except Exception:
            logger.exception("a batch of %d requests failed", len(batch))
        if len(batch) == 1:
            return [Response(batch[0].request.number, Status.FAILED)]
        # One by one, so that only the request that causes the failure fails.
        return [self._compute([queued])[0] for queued in batch]

    def _respond(self, connection: Connection, response: Response) -> None:
        self._connections.send(connection, frames.write_response(response))

"""The sockets of the engine process: who is connected, what arrives in whole frames, what is sent as it is taken.

One thread, nothing blocks but `poll`. Knows frames, not what is in them.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from service.engine.frames import READ_BYTES, BadFrame, FrameReader

logger = logging.getLogger(__name__)

# A worker that leaves so much unread is stuck; it is cut off rather than waited for.
MOST_UNREAD_BYTES = 64 * 1024 * 1024
# Between attempts to accept a worker while the process is out of files.
ACCEPT_SECONDS = 1.0


class HasFileno(Protocol):
    """What a selector can watch."""

    def fileno(self) -> int: ...


@dataclass(slots=True, eq=False)
class Connection:
    """One worker's end: what arrived in part, what could not be sent yet, and the servings that it holds."""

    peer: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    handles: list[int] = field(default_factory=list)
    is_open: bool = True


class Hub:
    """Accepts whoever connects to the listener. `on_body` gets each frame's body, `on_close` who has left."""

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
        """Calls `on_readable`, once, when there is something to read."""

        def call(readable: HasFileno) -> None:
            self._selector.unregister(readable)
            on_readable()

        self._selector.register(source, selectors.EVENT_READ, call)

    def wake(self) -> None:
        """Has `poll` return; may be called from any thread and from a signal."""
        with contextlib.suppress(OSError):  # it is over already, or awake: the socket is full
            self._waker.send(b"\0")

    def poll(self, *, wait: bool) -> None:
        """Takes in what has arrived; waits for something where nothing has."""
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
        """Sends what the worker takes now, and keeps the rest for when it takes more."""
        if not connection.is_open:
            return
        waited = bool(connection.unsent)
        connection.unsent += data
        try:
            del connection.unsent[: connection.peer.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._cut(connection)
            return
        if len(connection.unsent) > MOST_UNREAD_BYTES:
            logger.warning("a worker that does not read its answers is cut off")
            self._cut(connection)
        elif waited != bool(connection.unsent):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.peer, events, connection)

    def close(self) -> None:
        for connection in list(self.connections):
            self._cut(connection)
        for resource in (self._selector, self._waker, self._woken):
            resource.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has left already
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
                    self._cut(connection)
        except BlockingIOError:
            pass
        except ConnectionError:  # it has ended before it read all that was sent
            self._cut(connection)
        except (OSError, BadFrame) as error:
            logger.warning("a worker's connection is closed: %s", error)
            self._cut(connection)

    def _cut(self, connection: Connection) -> None:
        if connection.is_open:
            connection.is_open = False
            self.connections.discard(connection)
            self._selector.unregister(connection.peer)
            connection.peer.close()
            self._on_close(connection)

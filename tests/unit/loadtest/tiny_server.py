"""A small server with scripted answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator

TIMINGS = {"tokenize": 0.5, "queue": 0.25, "encode": 2.0, "search": 0.75, "rerank": 0.0, "fetch": 0.125, "total": 4.0}
BODY = json.dumps({"results": [{"hits": []}], "snapshot": "v", "timings_ms": TIMINGS}, separators=(",", ":")).encode()

Respond = Callable[[int], list[bytes]]


def answer(body: bytes = BODY, status: str = "200 OK", *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", "server: test", *headers, f"content-length: {len(body)}"])
    return f"{head}\r\n\r\n".encode() + body


class TinyServer:
    """Answers request number n with the pieces of `respond(n)`. An empty list leaves the client waiting; an empty piece
    closes the connection."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._numbers = itertools.count()
        self.connections = 0
        self.lines: list[str] = []
        self.bodies: list[dict[str, str]] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def start(self) -> None:
        self._threads[0].start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while data := connection.recv(65536):
                received += data
                head, end, body = received.partition(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                if not end or (length and len(body) < int(length[1])):
                    continue
                received = b""
                self.lines.append(head.split(b"\r\n")[0].decode())
                if body:
                    self.bodies.append(json.loads(body))
                for piece in self._respond(next(self._numbers)):
                    if not piece:
                        return
                    connection.sendall(piece)


@contextlib.contextmanager
def running(respond: Respond) -> Iterator[TinyServer]:
    server = TinyServer(respond)
    server.start()
    try:
        yield server
    finally:
        server.stop()

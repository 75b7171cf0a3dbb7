"""An HTTP server of Python's standard library on 127.0.0.1, in a thread, for the length of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

END_SECONDS = 30.0


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing, with the parts that most test servers share."""

    def body(self) -> bytes:
        """Reads the body of the request."""
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Sends an answer with its length; the client may have given up."""
        with suppress(OSError):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing."""


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Yields the port of a server that handles each request in a thread."""
    listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield listener.server_port
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join(END_SECONDS)

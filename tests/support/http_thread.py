"""An HTTP server of Python's standard library on 127.0.0.1, in a thread, for the length of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

END_SECONDS = 30.0


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

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

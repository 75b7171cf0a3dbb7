"""HTTP on the wire: URLs as people type them, bytes that are no HTTP at all, requests that never end, whole answers.

A URL with Chinese characters in it, which `curl` sends as they are, is malformed by the letter, and the parser refuses
it; browsers and libraries escape it first. What stays malformed, or takes too long to arrive, is answered in the shape
that every error has, and its connection closed.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast
from urllib.parse import quote

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from models.errors import CareError
from service.errors import MalformedHttp, SlowRequest
from service.middleware import RequestFrame
from service.settings import Settings

PRINTABLE_ASCII = "".join(map(chr, range(0x20, 0x7F)))
# The parser itself would collect a request line and headers without end.
MAX_HEAD_BYTES = 256 * 1024
# How long the rest of a refused request is read and thrown away: closed with bytes unread, a connection is reset, and
# the answer may be lost with it.
LINGER_SECONDS = 5.0
UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")
# What a client that asked for it waits for before it sends its body.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Joined:
    """A transport that keeps the head of an answer until the first bytes of its body come.

    uvicorn writes them one after the other: two system calls, two packets, and a client woken up to read a head.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and data != CONTINUE:
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def flush(self) -> None:
        """For an answer without a body."""
        if self._head:
            self.write(b"")

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever else a transport has)
        return getattr(self._transport, name)


class TolerantProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the bytes beyond ASCII in the URL of a GET escaped before they are parsed.

    A connection has `receive_seconds` from its opening to its first byte, and from the first byte of a request to its
    last. Between requests uvicorn's own time-out of idle connections holds. A client that takes nothing of its answer
    for `stalled_seconds` is left, with the megabytes that it does not want.
    """

    receive_seconds = 30.0
    stalled_seconds = 300.0
    frame: RequestFrame
    _head_bytes = 0
    _in_head = True
    _receiving = False
    _leaving = False
    _patience: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._joined = _Joined(transport)
        super().connection_made(cast(asyncio.Transport, self._joined))
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        self._head_bytes += len(data) if self._in_head else 0
        between_requests = self.cycle is None or not self.cycle.more_body
        if between_requests and data.startswith(b"GET ") and not data.isascii():
            line, end, rest = data.partition(b"\r\n")
            data = quote(line, safe=PRINTABLE_ASCII).encode("ascii") + end + rest
        self._feed(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")
        if self._leaving:
            return
        # A request that came whole, as nearly all do, never sees a timer; empty lines are no request.
        if not self._receiving and self._computing():
            self._stop_waiting()
        elif self._patience is None:
            self._wait_for_more()

    def _feed(self, data: bytes) -> None:
        """Parses bytes. An offer to go on in another protocol is ignored, as a server may.

        Java's own client and curl --http2 send one with every request. The parser takes the offer as accepted and stops
        behind the head, so another parser gets the same head without the offer, and the rest.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.send_400_response("CONNECT is not served here")
                return
            kept = [pair for pair in self.headers if pair[0] not in UPGRADE_HEADERS]
            keep_alive = [(b"connection", b"keep-alive" if self.parser.should_keep_alive() else b"close")]
            head = b"".join(b"%b: %b\r\n" % pair for pair in (*kept, *keep_alive))
            version = self.parser.get_http_version().encode()
            self.parser = httptools.HttpRequestParser(self)
            rest = data[offer.args[0] :]
            self._feed(b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self.url, version, head, rest))
        except httptools.HttpParserError:
            self.send_400_response("this is not an HTTP request that can be read")

    def on_message_begin(self) -> None:
        # What waited until now was the connection, or the rest of an earlier request.
        self._stop_waiting()
        self._in_head = self._receiving = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._receiving = True, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._joined.flush()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what never became a request, and closes the connection."""
        self._refuse(MalformedHttp(f"{msg}; URLs are at most 64 KiB, POST takes more"))

    def _wait_for_more(self) -> None:
        self._patience = self.loop.call_later(self.receive_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.flow.read_paused or (self._in_head and self._computing()):
            self._wait_for_more()  # the service is busy with an earlier request, and that one is to be answered
        elif self._receiving and (self._in_head or not self.cycle.response_started):
            self._refuse(SlowRequest(f"the request did not arrive within {self.receive_seconds:g} s; send it faster"))
        else:
            self.transport.close()  # nothing was asked, or it was answered before it was sent to its end

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.stalled_seconds, self._look_at_reader, unread)

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _look_at_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reader()
        else:
            self.transport.abort()  # closing would wait until all of it is read

    def _computing(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: CareError) -> None:
        """Answers by hand: there is no request, or not all of it, that the application could answer."""
        if self._leaving or self.transport.is_closing():
            return
        scope = cast(Scope, self.cycle.scope) if self._computing() else None
        self.transport.write(self.frame.answer_unparsed(error, scope))
        if self._computing():
            self.transport.close()  # which tells the application that nobody waits any more
            return
        self._leaving = True
        self._stop_waiting()
        self.transport.write_eof()
        self._patience = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def http_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How the application is put on a socket; whoever runs it also runs its lifespan."""
    # uvicorn makes the protocol's objects itself and knows no further arguments: the class carries them.
    own = {"receive_seconds": settings.receive_seconds, "frame": app.state.frame}
    protocol = type("Protocol", (TolerantProtocol,), own)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        # Nothing depends on a client's address, so nothing has to believe what a header says about it.
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )

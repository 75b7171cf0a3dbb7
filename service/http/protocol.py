"""uvicorn's HTTP protocol, made tolerant of raw Chinese in URLs, upgrade offers, malformed and slow requests.

Malformed or slow requests are answered in the service's error shape, and their connection is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from models.errors import CareError
from service.errors import Crowded, CrowdedAddress, MalformedHttp, SlowRequest

if TYPE_CHECKING:
    from service.http.middleware import RequestFrame
    from service.settings import Settings

LINE_ASCII = "".join(map(chr, range(0x20, 0x7F))) + "\r"
MAX_HEAD_BYTES = 256 * 1024  # of request line and headers, which the parser itself does not limit
# How long the rest of a refused request is read and dropped: a connection closed with unread bytes is reset, and the
# answer may be lost.
LINGER_SECONDS = 5.0
UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


# Of every answer: read as the type that it has, shown in no frame, no address passed on to other sites, kept by no
# cache, which would not tell one key from another.
HEADERS = b"x-content-type-options: nosniff\r\nx-frame-options: DENY\r\nreferrer-policy: no-referrer\r\n"
HEADERS += b"cache-control: no-store\r\n"
# Of answers over TLS: two years, as browsers' lists of such sites ask for.
ONLY_TLS = b"strict-transport-security: max-age=63072000\r\n"


class _Joined:
    """A transport that sends the head of an answer together with the first bytes of its body.

    uvicorn writes them one after the other: two system calls and two packets. `headers`, those of every answer, are
    added here: uvicorn checks each header of each answer, which takes 2 µs.
    """

    def __init__(self, transport: asyncio.Transport, headers: bytes) -> None:
        self._transport = transport
        self._headers = headers
        self._head = b""
        self._in_body = False

    def write(self, data: bytes) -> None:
        if self._in_body:
            self._transport.write(self._head + data)
            self._head = b""
        elif data == CONTINUE:
            self._transport.write(data)
        else:
            status, end, rest = data.partition(b"\r\n")
            self._head = status + end + self._headers + rest
            self._in_body = True

    def flush(self) -> None:
        """Ends an answer."""
        if self._head:
            self.write(b"")
        self._in_body = False

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any attribute of a transport)
        return getattr(self._transport, name)


class TolerantProtocol(HttpToolsProtocol):
    """uvicorn's protocol; escapes bytes beyond ASCII in the URL of a GET before they are parsed.

    `receive_seconds` limits the time from a connection's opening to its first byte, and from the first byte of a
    request to its last; between requests uvicorn's own limit of idle connections holds. A client that reads nothing
    of its answer for `stalled_seconds` is disconnected.
    """

    receive_seconds = 30.0
    stalled_seconds = 300.0
    common_headers = HEADERS
    frame: RequestFrame
    max_connections = 0
    max_address_connections = 0
    addresses: Counter[str]
    _address = ""
    _head_bytes = 0
    _in_head = True
    _in_line = False  # the request line of a GET goes on
    _receiving = False
    _leaving = False
    _patience: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._joined = _Joined(transport, self.common_headers)
        super().connection_made(cast(asyncio.Transport, self._joined))
        self._wait_for_more()
        self._address = (transport.get_extra_info("peername") or [""])[0]
        self.addresses[self._address] += 1
        if 0 < self.max_connections < len(self.connections):
            self._turn_away(Crowded("this process has as many connections as it may (CARE_MAX_CONNECTIONS)"))
        elif 0 < self.max_address_connections < self.addresses[self._address]:
            most = self.max_address_connections
            self._turn_away(CrowdedAddress(f"an address may have {most} connections at a time; use fewer"))

    def _turn_away(self, error: CareError) -> None:
        """Answers and closes at once, without waiting for the client to read: there may be many connections."""
        self._leaving = True
        self.transport.write(self.frame.answer_unparsed(error, None))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.addresses[self._address] -= 1
        if not self.addresses[self._address]:
            del self.addresses[self._address]
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
        if self._in_line or (between_requests and data.startswith(b"GET ")):
            if not data.isascii():
                line, end, rest = data.partition(b"\n")
                data = quote(line, safe=LINE_ASCII).encode("ascii") + end + rest
            self._in_line = b"\n" not in data  # a long one comes in several packets
        self._feed(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")
        if self._leaving:
            return
        # A request that came whole, as nearly all do, needs no timer; empty lines are not a request.
        if not self._receiving and self._computing():
            self._stop_waiting()
        elif self._patience is None:
            self._wait_for_more()

    def _feed(self, data: bytes) -> None:
        """Parses bytes, and ignores offers to upgrade, which Java's own client and curl --http2 send.

        The parser stops behind a head with an offer, so a new parser gets the same head without it, and the rest.
        """
        while data:
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
                return
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
                data = b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self.url, version, head, rest)
            except httptools.HttpParserError:
                self.send_400_response("this is not an HTTP request that can be read")
                return

    def on_message_begin(self) -> None:
        # The timer until now was for the connection, or for the rest of an earlier request.
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
            self._wait_for_more()  # an earlier request is still being answered
        elif self._receiving and (self._in_head or not self.cycle.response_started):
            self._refuse(SlowRequest(f"the request did not arrive within {self.receive_seconds:g} s; send it faster"))
        else:
            self.transport.close()  # no request, or one that was answered before its end arrived

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
        """Answers without the application, which has no request or only a part of one."""
        if self._leaving or self.transport.is_closing():
            return
        scope = cast(Scope, self.cycle.scope) if self._computing() else None
        self.transport.write(self.frame.answer_unparsed(error, scope))
        if self._computing():
            self.transport.close()  # the application then sees a disconnect
            return
        self._leaving = True
        self._stop_waiting()
        if self.transport.can_write_eof():  # TLS cannot close one direction
            self.transport.write_eof()
        self._patience = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def http_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Returns uvicorn's configuration; the caller runs the lifespan."""
    # uvicorn constructs the protocol itself, so further arguments are attributes of its class.
    own = {
        "receive_seconds": settings.receive_seconds,
        "common_headers": HEADERS if settings.tls_cert is None else HEADERS + ONLY_TLS,
        "frame": app.state.frame,
        "max_connections": settings.max_connections,
        "max_address_connections": settings.max_address_connections,
        "addresses": Counter(),
    }
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
        proxy_headers=False,  # a header cannot lend a client another address
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
    )

"""HTTP as it comes in: URLs as people type them, and bytes that are no HTTP at all.

A URL with Chinese characters in it, which `curl` sends as they are, is malformed by the letter, and the parser refuses
it; browsers and libraries escape it first. What stays malformed is answered in the shape that every error has.
"""

from __future__ import annotations

import secrets
from urllib.parse import quote

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import MalformedHttp, answer_for

PRINTABLE_ASCII = "".join(map(chr, range(0x20, 0x7F)))
# The parser itself would collect a request line and headers without end.
MAX_HEAD_BYTES = 256 * 1024


class TolerantProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the bytes beyond ASCII in the URL of a GET escaped before they are parsed."""

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._in_head else 0
        between_requests = self.cycle is None or not self.cycle.more_body
        if between_requests and data.startswith(b"GET ") and not data.isascii():
            line, end, rest = data.partition(b"\r\n")
            data = quote(line, safe=PRINTABLE_ASCII).encode("ascii") + end + rest
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what never became a request, and closes the connection."""
        if self.transport.is_closing():
            return
        request_id = secrets.token_hex(8)
        said = "this is not an HTTP request that can be read" if msg.startswith("Invalid HTTP") else msg
        body = answer_for(MalformedHttp(f"{said}; URLs are at most 64 KiB, POST takes more")).body(request_id)
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %b\r\nconnection: close\r\n\r\n" % (len(body), request_id.encode())
        )
        self.transport.write(head + body)
        self.transport.close()

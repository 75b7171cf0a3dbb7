"""HTTP as people type it: a URL with Chinese characters in it, which `curl` sends as they are.

Strictly such a request line is malformed and the parser refuses it; browsers and libraries escape it first.
"""

from __future__ import annotations

from urllib.parse import quote

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PRINTABLE_ASCII = "".join(map(chr, range(0x20, 0x7F)))


class TolerantProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the bytes beyond ASCII in the URL of a GET escaped before they are parsed."""

    def data_received(self, data: bytes) -> None:
        between_requests = self.cycle is None or not self.cycle.more_body
        if between_requests and data.startswith(b"GET ") and not data.isascii():
            line, end, rest = data.partition(b"\r\n")
            data = quote(line, safe=PRINTABLE_ASCII).encode("ascii") + end + rest
        super().data_received(data)

"""HTTP/1.1 as the load generators read it: the bytes of a connection to answers, and the only address they talk to."""

from __future__ import annotations

import re
from typing import NamedTuple

from loadtest.harness.errors import BenchError

HOST = "127.0.0.1"
URL = re.compile(rf"http://{re.escape(HOST)}:(\d{{1,5}})/?", re.ASCII)
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
HEAD_LIMIT = 65_536


class BadAnswer(Exception):
    """Bytes that are not an HTTP answer of a stated length."""


def port_of(url: str) -> int:
    """The port of `http://127.0.0.1:PORT`; any other address is refused."""
    match = URL.fullmatch(url)
    if match is None:
        raise BenchError(f"{url}: the load goes to http://{HOST}:PORT only; start the service on this machine")
    return int(match[1])


class Answer(NamedTuple):
    """A complete HTTP answer; `head` is its status line and headers as they came."""

    status: int
    head: bytes
    body: bytes


class ResponseReader:
    """The bytes of a connection to answers, however they are cut; one answer at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._status = 0
        self._body_at = 0
        self._end = 0

    def feed(self, data: bytes) -> Answer | None:
        """The answer once it is complete; raises BadAnswer where it cannot be."""
        self._received = self._received + data if self._received else data
        if not self._body_at and not self._read_head():
            return None
        missing = self._end - len(self._received)
        if missing > 0:
            return None
        if missing < 0:
            raise BadAnswer("bytes after the body")
        answer = Answer(self._status, self._received[: self._body_at], self._received[self._body_at :])
        self._received = b""
        self._body_at = 0
        return answer

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            if len(self._received) > HEAD_LIMIT:
                raise BadAnswer("a head without end")
            return False
        status = STATUS.match(self._received)
        length = CONTENT_LENGTH.search(self._received, 0, end + 2)
        if status is None or length is None:
            raise BadAnswer("no status line" if status is None else "no Content-Length")
        self._status = int(status[1])
        self._body_at = end + 4
        self._end = self._body_at + int(length[1])
        return True

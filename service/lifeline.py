"""The thread between the supervisor and a process it started: a socket that the process has as its standard input.

The process says one line, once it is ready or once it cannot be; its supervisor's end is how it notices that it is
alone. Knows nothing of what the processes do.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import orjson

STDIN = 0


@dataclass(frozen=True, slots=True)
class Word:
    """What a process said: that it is ready, and what the service is to print; or why it cannot start."""

    ready: bool
    text: str


class Lifeline:
    """The process's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def inherited(cls) -> Lifeline:
        return cls(socket.socket(fileno=STDIN))

    def fileno(self) -> int:
        """Readable once the supervisor is gone: it never writes."""
        return self._connection.fileno()

    def wait(self) -> None:
        """Returns once the supervisor is gone."""
        while self._connection.recv(1):
            pass

    def say(self, word: Word) -> None:
        self._connection.sendall(orjson.dumps(word) + b"\n")


def read_word(line: bytes) -> Word | None:
    """A line that a process wrote; None where it ended without one."""
    return Word(**orjson.loads(line)) if line else None

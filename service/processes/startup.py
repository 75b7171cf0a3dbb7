"""Startup of every process: configures its log, binds its address, reports to the supervisor."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from service.errors import PortTaken
from service.metrics import ACCESS_LOGGER
from service.settings import Settings

STDIN = 0
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure_logging(settings: Settings, process: str = "") -> None:
    """Logs to standard error, the access log to standard output; `process` names this process in every line."""
    own = f" [{process}]" if process else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(f"%(asctime)s{own} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for client in ("httpx", "httpcore"):  # a line for every call, with its URL, which may hold a password
        logging.getLogger(client).setLevel(logging.WARNING)
    if settings.access_log:
        lines = logging.StreamHandler(sys.stdout)
        lines.setFormatter(logging.Formatter("%(message)s"))
        access_logger = logging.getLogger(ACCESS_LOGGER)
        access_logger.addHandler(lines)
        access_logger.setLevel(logging.INFO)
        access_logger.propagate = False


class OneLine(logging.Formatter):
    """Writes a message as one line, and indents a traceback: a client's text in them cannot look like another line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return _escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802, ANN401 (logging's name and type)
        return "\n".join(f"  {_escape(line)}" for line in super().formatException(ei).splitlines())


def _escape(line: str) -> str:
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], line)


@contextlib.contextmanager
def listeners(settings: Settings, take: Callable[[str, int], socket.socket]) -> Iterator[list[socket.socket]]:
    """Yields the service's socket, and administrators' if they have one, each taken by `bind`, `join` or `reserve`."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(take(settings.host, settings.port))]
        if settings.admin_port is not None:
            host = settings.host if settings.admin_host is None else settings.admin_host
            taken.append(stack.enter_context(take(host, settings.admin_port)))
        yield taken


def with_ports(settings: Settings, taken: Sequence[socket.socket]) -> Settings:
    """Returns the settings with the ports that were taken in the place of 0."""
    return settings.model_copy(update=dict(zip(("port", "admin_port"), map(port_of, taken), strict=False)))


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Binds the address without listening: clients are refused, not kept waiting, while the snapshot opens.

    The kernel spreads new connections over sockets that share an address. Each worker has its own: of workers that
    accept from one socket, the one that is awake takes most connections.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        how, remedy = "share" if shared else "listen on", "choose another CARE_HOST or CARE_PORT"
        raise PortTaken(f"cannot {how} {host}:{port} ({error.strerror}); {remedy}") from error
    return listener


join = partial(bind, shared=True)


def reserve(host: str, port: int) -> socket.socket:
    """Binds the address for processes that use `join`; raises PortTaken if another service shares it already."""
    if port:
        bind(host, port).close()
    return join(host, port)


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True, slots=True)
class StartupMessage:
    """A process's report to its supervisor: ready, with the text to print, or why it cannot start."""

    ready: bool
    text: str


class SupervisorPipe:
    """A process's end of the socket to its supervisor, inherited as standard input.

    The process sends one message. The supervisor sends nothing: the socket becomes readable when the supervisor ends.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def inherited(cls) -> SupervisorPipe:
        return cls(socket.socket(fileno=STDIN))

    def fileno(self) -> int:
        return self._connection.fileno()

    def wait(self) -> None:
        """Returns when the supervisor has ended."""
        while self._connection.recv(1):
            pass

    def send(self, message: StartupMessage) -> None:
        self._connection.sendall(orjson.dumps(message) + b"\n")

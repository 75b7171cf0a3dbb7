"""The address that the service listens on: taken by one process, or shared by the workers of one service."""

from __future__ import annotations

import socket

from service.errors import PortTaken


def bind(host: str, port: int) -> socket.socket:
    """The address, taken but not yet listened on: clients are refused, not kept waiting, while the snapshot opens."""
    listener = _socket(host)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host}:{port} ({error.strerror})"
        raise PortTaken(f"{reason}; choose another CARE_HOST or CARE_PORT") from error
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """The address, taken for whoever uses `join`; refused where another service has it, though it may share it."""
    if port:
        bind(host, port).close()
    return join(host, port)


def join(host: str, port: int) -> socket.socket:
    """One of several sockets at an address. The kernel deals new connections out to those that listen.

    Each worker has its own: of workers that accept from one socket, whoever is awake takes most of a crowd.
    """
    listener = _socket(host)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot share {host}:{port} ({error.strerror}); choose another CARE_PORT") from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _socket(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener

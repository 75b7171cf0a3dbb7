"""The address that the service listens on: taken once, by whoever starts first."""

from __future__ import annotations

import socket

from service.errors import PortTaken


def bind(host: str, port: int) -> socket.socket:
    """The address, taken but not yet listened on: clients are refused, not kept waiting, while the snapshot opens."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host}:{port} ({error.strerror})"
        raise PortTaken(f"{reason}; choose another CARE_HOST or CARE_PORT") from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

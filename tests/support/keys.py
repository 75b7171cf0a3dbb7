"""Keys files for tests, written as `care keys` writes them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import cli


def create(path: Path, name: str, *options: str) -> str:
    """Adds a new key to the file and returns it as its user gets it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["keys", "--file", str(path), "create", name, *options]) == 0
    return printed.getvalue().strip()


def revoke(path: Path, name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["keys", "--file", str(path), "revoke", name]) == 0


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}

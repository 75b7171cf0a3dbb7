"""Test certificates made by openssl: an authority, and certificates that it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path

    @classmethod
    def authority(cls, folder: Path, name: str) -> Certificate:
        made = cls(folder / f"{name}.pem", folder / f"{name}.key")
        _openssl(made, name)
        return made

    def sign(self, folder: Path, name: str) -> Certificate:
        """Signs a certificate for 127.0.0.1, for a server or a client."""
        made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
        _openssl(made, name, "-CA", self.cert, "-CAkey", self.key, "-addext", "subjectAltName=IP:127.0.0.1")
        return made


def _openssl(made: Certificate, name: str, *options: object) -> None:
    own = ["-keyout", made.key, "-out", made.cert, "-subj", f"/CN={name}"]
    command = ["openssl", "req", "-x509", *KEY, *own, *options]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)

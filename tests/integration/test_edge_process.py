"""A service of two workers with keys, TLS and an admin port, and its reload on SIGHUP."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx

from loadtest.harness.servers import free_port
from models.encoder.onnx import OnnxEncoder
from tests.api.support import ENCODER, PATIENT, build_collection
from tests.integration.processes import SERVE, until
from tests.support.certificates import Certificate
from tests.support.keys import bearer, create, revoke


def test_workers_share_keys_certificate_and_ports(tmp_path: Path, encoder: OnnxEncoder) -> None:
    built = build_collection(tmp_path / "collection", encoder)
    authority = Certificate.authority(tmp_path, "authority")
    server, keys = authority.sign(tmp_path, "server"), tmp_path / "keys.json"
    searcher = create(keys, "searcher", "--scope", "search")
    keeper = create(keys, "keeper", "--scope", "admin")
    admin_port = free_port()
    environment = {
        "CARE_COLLECTION": built.root, "CARE_ENCODER": ENCODER, "CARE_PORT": 0, "CARE_THREADS": 1, "CARE_WORKERS": 2,
        "CARE_ADMIN_PORT": admin_port, "CARE_KEYS_FILE": keys, "CARE_RELOAD_SECONDS": 0, "PYTHONPATH": ".",
        "CARE_TLS_CERT": server.cert, "CARE_TLS_KEY": server.key, "CARE_AUDIT_LOG": tmp_path / "audit.jsonl",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env=os.environ | PATIENT | {name: str(value) for name, value in environment.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    trust = ssl.create_default_context(cafile=authority.cert)

    def get(address: str, path: str, key: str) -> int:
        """Sends on a new connection: any worker may answer."""
        return httpx.get(address + path, headers=bearer(key), verify=trust, timeout=60).status_code

    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.match(r"CARE Search is ready at (https://127\.0\.0\.1:\d+) ", line)
        assert ready, line
        address, admin = ready[1], f"https://127.0.0.1:{admin_port}"
        assert {get(address, "/v1/search?q=a", searcher) for _ in range(8)} == {200}
        assert {get(address, "/admin/versions", keeper) for _ in range(8)} == {404}
        until(lambda: {get(admin, "/admin/versions", keeper) for _ in range(8)} == {200})
        assert {get(admin, "/admin/versions", searcher) for _ in range(8)} == {403}

        later = create(keys, "later", "--scope", "search")
        revoke(keys, "searcher")
        assert {get(address, "/v1/search?q=a", later) for _ in range(8)} == {401}, "the file is not polled"
        before = server.cert.read_text()
        port = int(address.rpartition(":")[2])

        def shown() -> set[str]:
            return {ssl.get_server_certificate(("127.0.0.1", port)) for _ in range(8)}

        os.replace(authority.sign(tmp_path, "renewed").cert, server.cert)
        process.send_signal(signal.SIGHUP)
        until(lambda: {get(address, "/v1/search?q=a", later) for _ in range(16)} == {200})
        assert {get(address, "/v1/search?q=a", searcher) for _ in range(8)} == {401}
        assert shown() == {before}, "its key is not there yet"
        os.replace(tmp_path / "renewed.key", server.key)
        process.send_signal(signal.SIGHUP)
        until(lambda: shown() == {server.cert.read_text()})
        assert before not in shown()
    finally:
        process.terminate()
        process.communicate(timeout=60)

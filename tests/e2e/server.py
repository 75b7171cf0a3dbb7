"""The real service as a subprocess, on a port that it keeps over a restart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from loadtest.harness.servers import free_port
from tests.api.support import OPEN, PATIENT

REPOSITORY = Path(__file__).parents[2]
ENCODER = REPOSITORY / "models" / "pretrained" / "care-small-zh"
COMMAND = "from service.processes.server import serve; from service.settings import Settings; serve(Settings())"
START_SECONDS = 120
STOP_SECONDS = 60


class Server:
    """One service over one collection; `start` returns when it is ready."""

    def __init__(self, collection: Path, **environment: str) -> None:
        self._port = free_port()
        self._environment = (
            os.environ
            | PATIENT
            | OPEN
            | {
                "CARE_COLLECTION": str(collection),
                "CARE_ENCODER": str(ENCODER),
                "CARE_PORT": str(self._port),
                "CARE_THREADS": "1",
            }
            | environment
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", COMMAND], cwd=REPOSITORY, env=self._environment)
        give_up = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with {self._process.returncode} before it was ready")
            if time.monotonic() > give_up:
                self.stop()
                raise RuntimeError(f"the service was not ready after {START_SECONDS} s")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            finally:
                self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=START_SECONDS) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

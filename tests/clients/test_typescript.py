"""docs/openapi.json against the service, and the TypeScript client generated from it, in Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from service.http.app import create_app
from service.settings import Settings

OPENAPI = Path("docs/openapi.json")
FOLDER = Path("clients/typescript")


def test_the_committed_openapi_document_is_that_of_the_service() -> None:
    schema = create_app(Settings()).openapi()
    assert json.loads(OPENAPI.read_text(encoding="utf-8")) == json.loads(json.dumps(schema)), "run `make openapi`"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node: `make programs` installs it")
@pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="needs its packages: run `make typescript` once")
def test_the_client_is_built_and_works_in_node(service_url: str) -> None:
    environment = os.environ | {"CARE_URL": service_url}
    for script in ("build", "test"):
        done = subprocess.run(
            ["npm", "run", "--silent", script], cwd=FOLDER, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

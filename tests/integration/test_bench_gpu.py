"""The GPU benchmark's dry run on the CPU: encoder, snapshot, service and report are real, wrk is a stand-in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from loadtest.harness import REPOSITORY

# Sends requests as wrk does, but only a dozen, and prints what search.lua makes wrk print.
WRK = """#!{python}
import http.client, json, sys
from urllib.parse import urlsplit
arguments = sys.argv[1:]
url = urlsplit(next(one for one in arguments if one.startswith("http")))
bodies = open(arguments[-1], encoding="utf-8").read().splitlines()
connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
failed = 0
for body in bodies[:12]:
    connection.request("POST", "/v1/search", body.encode(), {{"Content-Type": "application/json"}})
    answer = connection.getresponse()
    failed += answer.status != 200 or len(json.loads(answer.read())["results"][0]["hits"]) != 10
print("as wrk would")
print(json.dumps({{"requests": 12, "microseconds": 1000000, "p50": 900, "p99": 1800, "status": failed,
                   "connect": 0, "read": 0, "write": 0, "timeout": 0}}))
"""


def test_the_dry_run_reports_every_row(tmp_path: Path) -> None:
    wrk = tmp_path / "wrk"
    wrk.write_text(WRK.format(python=sys.executable), encoding="utf-8")
    wrk.chmod(0o755)
    shape = ("--documents", "500", "--layers", "1", "--width", "64", "--vocabulary", "25000", "--device", "cpu")
    options = ("--workers", "1", "--connections", "1", "2", "--seconds", "1")
    command = [sys.executable, "-m", "loadtest.lab.gpu", *shape, *options]
    command += ["--folder", str(tmp_path / "made"), "--wrk", str(wrk)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (\d+) \| 12 \| 0\.90 \| 1\.80 \| [\d.]+ \|.* \| 0 \|$", done.stdout, re.MULTILINE)
    assert rows == ["1", "2"]
    assert "- snapshot: 500 × 64 random unit vectors, exact search" in done.stdout
    assert "- encoder: BERT 1 × 64, vocabulary 25,000, random weights" in done.stdout
    assert re.search(r"^- p50 of one connection: 0\.90 ms \(at most 4: yes\)$", done.stdout, re.MULTILINE)

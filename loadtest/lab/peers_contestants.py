"""Who meets in `make bench-peers`: each server's command line, and how a ranking is asked of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness.client import PATH, TOP_K, Form, Job, write_requests
from loadtest.harness.errors import BenchError
from loadtest.harness.http1 import HOST, port_of
from loadtest.harness.processes import Server, care_server, free_port
from loadtest.lab.peers_prepare import INFINITY, TXTAI, Prepared

# Of the peers: torch's own choice on two cores, and one, which takes less in all where requests come in a crowd.
THREADS = (2, 1)
# Of ours: what a machine of two cores is best given where requests come in a crowd.
WORKERS = 2
TIMEOUT_SECONDS = 30
VERSIONS = "import sys, importlib.metadata as m; print(', '.join(f'{name} {m.version(name)}' for name in sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server and how it is asked; `own` says that it is ours."""

    name: str
    server: Server
    form: Form
    own: bool


def contestants(prepared: Prepared, folder: Path) -> list[Contestant]:
    """Ours and the peers, each peer with every number of threads; `folder` takes a configuration file."""
    ours = [Contestant(f"CARE {variant}", _care(prepared, variant), Form.IDS, True) for variant in prepared.encoders]
    ours.append(Contestant("CARE int8, whole hits", _care(prepared, "int8", "-whole"), Form.CARE, True))
    for form, suffix in ((Form.IDS, ""), (Form.CARE, ", whole hits")):
        server = _care(prepared, "int8", f"-{WORKERS}-{form}", WORKERS)
        ours.append(Contestant(f"CARE int8, {WORKERS} workers{suffix}", server, form, True))
    peers = []
    for threads in THREADS:
        suffix = f"{threads} thread{'s' if threads > 1 else ''}"
        peers.append(Contestant(f"txtai, {suffix}", _txtai(prepared, folder, threads), Form.TXTAI, False))
        peers.append(Contestant(f"Infinity + FAISS, {suffix}", _infinity(prepared, threads), Form.IDS, False))
    return ours + peers


def ask(url: str, form: Form, query: str) -> list[str]:
    """The ids of a contestant's hits, best first."""
    request = next(write_requests(Job(url, [query], "dense", 1, 1, numbered=False, form=form)))
    head, _, body = request.partition(b"\r\n\r\n")
    method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=TIMEOUT_SECONDS)) as connection:
        connection.request(method, path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    if answer.status != 200:
        raise BenchError(f"{url}{PATH} answered {answer.status} to {query!r}; see its log")
    parsed = json.loads(content)
    hits = parsed if form is Form.TXTAI else parsed["results"][0]["hits"]
    ids = [str(hit["id"]) for hit in hits]
    if len(ids) != TOP_K:
        raise BenchError(f"{url} gave {len(ids)} hits, not {TOP_K}, to {query!r}")
    return ids


def versions() -> str:
    """What the peers' environments hold of that which matters for speed."""
    txtai = _installed(TXTAI, "txtai", "torch", "transformers", "faiss-cpu", "uvicorn", "uvloop")
    infinity = _installed(INFINITY, "infinity-emb", "torch", "transformers", "sentence-transformers", "faiss-cpu")
    return f"{txtai}; {infinity}"


def _care(prepared: Prepared, variant: str, suffix: str = "", workers: int = 1) -> Server:
    plain = care_server(prepared.collection)
    own = {"CARE_ENCODER": str(prepared.encoders[variant]), "CARE_WORKERS": str(workers)}
    environment = {**plain.environment, **own}
    return Server(f"care-{variant}{suffix}", plain.command, plain.port, environment)


def _txtai(prepared: Prepared, folder: Path, threads: int) -> Server:
    config = folder / "txtai.yml"
    settings = {"path": str(prepared.txtai), "embeddings": {"path": str(prepared.weights)}}
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML too
    port = free_port()
    command = [str(TXTAI), "-m", "uvicorn", "txtai.api:app", "--host", HOST, "--port", str(port), "--no-access-log"]
    return Server(f"txtai-{threads}", command, port, {"CONFIG": str(config), **_environment(threads)}, ready="/count")


def _infinity(prepared: Prepared, threads: int) -> Server:
    port = free_port()
    files = (prepared.weights, prepared.vectors, prepared.index, prepared.ids)
    command = [str(INFINITY), "-m", "loadtest.lab.peers_infinity", *map(str, files), str(port)]
    return Server(f"infinity-{threads}", command, port, _environment(threads))


def _environment(threads: int) -> dict[str, str]:
    """Neither peer may ask a hub for what lies in its folder, or send statistics."""
    private = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
    return private | {"OMP_NUM_THREADS": str(threads)}


def _installed(python: Path, *packages: str) -> str:
    done = subprocess.run([str(python), "-c", VERSIONS, *packages], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def missing_environments() -> Sequence[Path]:
    return [python for python in (TXTAI, INFINITY) if not python.exists()]

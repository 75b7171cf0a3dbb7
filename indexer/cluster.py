"""Encodes on a Ray cluster: one process with an encoder for every GPU, or for every few CPUs.

The shards are the same lists of texts that one process would encode, so the vectors are the same. Each process writes
its shards itself and returns their names. Ray is imported when a build asks for it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from indexer.encode import Encoder, encode_shard, reason_of
from indexer.errors import BadCluster
from indexer.store.shards import Shards

if TYPE_CHECKING:
    import pyarrow as pa

LOCAL = "local"
RAY_CLIENT = "ray://"
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Cluster:
    """Where Ray runs (local, auto or HOST:PORT), how a node opens the encoder, and what it needs: a GPU, or CPUs."""

    address: str
    open_encoder: Callable[[], Encoder]
    processors: int = 1
    gpus: bool = False

    def require(self) -> None:
        """Raises BadCluster if the address does not answer, before the corpus is read."""
        if self.address.startswith(RAY_CLIENT):
            advice = "run the command on a node of the cluster, with --ray auto or --ray HOST:PORT"
            raise BadCluster(f"{self.address}: Ray's client cannot run Ray Data; {advice}")
        if self.address not in (LOCAL, "auto"):
            host, _, port = self.address.rpartition(":")
            try:
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            except (OSError, ValueError, OverflowError) as error:
                advice = "give local, auto or HOST:PORT of a cluster that `ray status` shows"
                raise BadCluster(f"no Ray cluster answers at {self.address} ({error}); {advice}") from error
        _import_ray(self.address)

    def encode(self, shards: Iterable[list[str]], encoder: Encoder, place: Shards) -> Iterator[int]:
        """As `indexer.encode.EncodeShards`; shards are finished in any order."""
        ray = _import_ray(self.address)
        import pyarrow as pa  # comes with Ray

        with _connected(ray, self.address):
            # Ray's object store holds the texts and spills to its disk; this process does not.
            texts = [ray.put(pa.table({"texts": [shard]})) for shard in shards]
            finished = ray.data.from_arrow_refs(texts).map_batches(
                ShardWorker,
                fn_constructor_args=(self.open_encoder, encoder.fingerprint, place),
                batch_size=1,
                batch_format="pyarrow",
                **self._processes(ray, len(texts)),
            )
            for row in finished.iter_rows():
                yield count_texts(row, place)

    def _processes(self, ray: Any, shards: int) -> dict[str, Any]:  # noqa: ANN401 - an untyped library's module
        """Returns how many processes, and what each needs."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(node.get("GPU", 0)) for node in nodes) if self.gpus else 0
        needs = {"num_gpus": 1} if gpus else {"num_cpus": self.processors}
        size = gpus or sum(int(node.get("CPU", 0)) // self.processors for node in nodes)
        if not size:
            raise BadCluster(f"no node at {self.address} has {self.processors} processors; give fewer --threads")
        strategy = ray.data.ActorPoolStrategy(size=min(size, shards), max_tasks_in_flight_per_actor=2)
        return {"compute": strategy, **needs}


class ShardWorker:
    """A process of the cluster: shards of texts in, names of written shards or errors out."""

    def __init__(self, open_encoder: Callable[[], Encoder], fingerprint: str, place: Shards) -> None:
        self._open = open_encoder
        self._fingerprint = fingerprint
        self._place = place

    def __call__(self, batch: pa.Table) -> pa.Table:
        """One row (texts list<string>) to one row: node, texts, name, problem (empty if there is none)."""
        texts = batch["texts"][0].as_py()
        name = problem = ""
        try:
            name = encode_shard(texts, self._encoder, self._place)
        except Exception as error:  # the trace is in Ray's log on the node
            problem = reason_of(error)
        row = {"node": socket.gethostname(), "texts": len(texts), "name": name, "problem": problem}
        return type(batch).from_pylist([row])

    @cached_property
    def _encoder(self) -> Encoder:
        encoder = self._open()
        if encoder.fingerprint != self._fingerprint:
            reason = f"its encoder is {encoder.fingerprint}, this machine's {self._fingerprint}"
            advice = "copy the same folder to every node, or choose a --variant or --precision that all can run"
            raise BadCluster(f"{reason}; {advice}")
        return encoder


def count_texts(row: dict[str, Any], place: Shards) -> int:
    """Counts the texts of a finished shard; raises BadCluster if it failed or this machine cannot read it."""
    if row["problem"]:
        raise BadCluster(f"node {row['node']}: {row['problem']}")
    if not place.bring(row["name"]):
        where = f"{place} on node {row['node']} is not the {place} of this machine"
        raise BadCluster(f"{where}; give --shards a folder that all nodes mount, or an address such as s3://…")
    return int(row["texts"])


def _import_ray(address: str) -> Any:  # noqa: ANN401
    # Read by Ray when it is imported: no usage statistics leave the cluster, and errors are reported by us.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address == LOCAL:  # listens on loopback only, as on Windows and macOS
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import_module("ray.data")
    except ModuleNotFoundError as error:
        raise BadCluster(f"--ray needs {error.name}, which the ray extra brings: care-search[ray]") from error
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):  # the other one writes into Ray's own folder
            handler.setLevel(logging.CRITICAL)
    return import_module("ray")


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:  # noqa: ANN401
    """Connects to Ray quietly and raises its errors as BadCluster; a local cluster ends with the connection."""
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        options["include_dashboard"] = False
    main, own = threading.current_thread() is threading.main_thread(), ray.data.exceptions
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with _without_stderr():
            ray.init(**options)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        raise BadCluster(f"the Ray cluster {address} cannot be joined ({error}); see `ray status`") from error
    with redirect_stdout(sys.stderr):  # Ray prints dead processes; standard output is for our result line
        try:
            if main:
                signal.signal(signal.SIGTERM, terminate)  # Ray's own would end the command before its cleanup
            context = ray.data.DataContext.get_current()
            context.print_on_execution_start = context.enable_progress_bars = False
            yield
        except (ray.exceptions.RayError, own.ExecutionTimeoutError, own.SystemException) as error:
            reason = str(error).strip().partition("\n")[0]
            raise BadCluster(f"Ray gave up ({reason}); run the same command again: what is encoded is kept") from error
        finally:
            ray.shutdown()  # ends the thread that prints


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards standard error by its descriptor, which Ray's core writes to."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

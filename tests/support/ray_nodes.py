"""Two Ray nodes of one CPU each on this machine, in a separate process: pytest itself never imports Ray.

python -m tests.support.ray_nodes

All files of Ray are in RAY_TMPDIR: its default folder may not exist, or may belong to another cluster.
The first line of standard output is the address. A line on standard input kills the second node; its end ends them all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

# Despite its name: if it is unset, Ray listens on every interface. The token keeps others out in any case.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# By default Ray's processes have a low priority, and on a busy machine would hardly run.
EQUAL = {"RAY_worker_niceness": "0"}
MEMORY_BYTES = 100_000_000
STARTS = 3
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Nodes:
    """A running cluster; `environment` is what a process needs to join it."""

    address: str
    environment: dict[str, str]
    process: subprocess.Popen[str]

    def lose_one(self) -> None:
        """Kills the second node and everything on it; returns when it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "lost\n"


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Yields a cluster; starts it again if Ray, which waits 30 s for a node, gave up."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    common = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"} | LOOPBACK | EQUAL | token
    errors = ""
    for _ in range(STARTS):
        with _process(common) as (process, environment):
            assert process.stdout is not None
            if address := process.stdout.readline().strip():
                yield Nodes(address, environment, process)
                return
            errors = process.communicate()[1]
    raise AssertionError(f"the Ray cluster did not start: {errors}")


@contextlib.contextmanager
def _process(common: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Yields the process of the nodes and its environment, with a new folder."""
    folder = tempfile.mkdtemp(prefix="care-ray-")  # a short path: sockets in it are limited to 107 bytes
    environment = common | {"RAY_TMPDIR": folder}
    command = [sys.executable, "-m", "tests.support.ray_nodes"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, environment
    finally:
        try:
            process.communicate(timeout=STOP_SECONDS)  # closes its standard input
        except subprocess.TimeoutExpired:
            process.kill()  # Ray's reaper ends the nodes
            process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": MEMORY_BYTES, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    second = cluster.add_node(**node)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
        print("lost", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

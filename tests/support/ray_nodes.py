"""Two Ray nodes of one processor each on this machine, in a process of their own: pytest itself never imports Ray.

python -m tests.support.ray_nodes

All that Ray keeps lies in RAY_TMPDIR: its own place need not exist, and another cluster may live there.
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

# The name says otherwise, but unset it has Ray listen on every interface; and the token keeps others out in any case.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray's processes give way to all others by default, and a busy machine would leave them next to nothing.
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
        """Returns when the second node and all that ran on it has been killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "lost\n"


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A cluster for the length of the block; started again where Ray, which gives a node 30 s, gave up."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    common = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"} | LOOPBACK | EQUAL | token
    said = ""
    for _ in range(STARTS):
        with _process(common) as (process, environment):
            assert process.stdout is not None
            if address := process.stdout.readline().strip():
                yield Nodes(address, environment, process)
                return
            said = process.communicate()[1]
    raise AssertionError(f"the Ray cluster did not start: {said}")


@contextlib.contextmanager
def _process(common: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process of the nodes, and the environment that it has: with a folder of its own."""
    folder = tempfile.mkdtemp(prefix="care-ray-")  # short: sockets lie in it, whose paths may have 107 bytes
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

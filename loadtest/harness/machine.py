"""Reads the commit, machine and versions that a published figure carries, and memory and CPU time from /proc."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loadtest.harness import REPOSITORY

# Builds of one library under different names; if several are installed, the first one is imported.
PACKAGES = [["onnxruntime-gpu", "onnxruntime"], ["faiss-gpu-cuvs", "faiss-gpu", "faiss-cpu"]]
PACKAGES += [[name] for name in ("fastapi", "uvicorn", "uvloop", "httptools")]
SECRETS = {"CARE_ADMIN_TOKEN", "CARE_REDIS_KEY"}
SAMPLE_SECONDS = 0.5
# As /proc/net/tcp writes it.
ESTABLISHED = "01"
# The low bits of the id of a process's clock; the others are its inverted pid (clock_getcpuclockid in libc).
PROCESSOR_CLOCK = 2


def commit() -> str:
    """Returns the short hash, and whether there are uncommitted changes."""
    name = output("git", "rev-parse", "--short", "HEAD")
    if not name:
        return "unknown (not a git checkout)"
    return f"{name} with uncommitted changes" if output("git", "status", "--porcelain") else name


def machine() -> str:
    """Model and number of the processors that this process may use, and the load average."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    models = [line.partition(":")[2].strip() for line in output("lscpu").splitlines() if line.startswith("Model name")]
    model = next((name for name in models if name not in {"", "-"}), platform.processor() or "unknown processor")
    return f"{model}, {cores} cores, {platform.machine()}, load average {os.getloadavg()[0]:.1f} before the run"


def versions() -> str:
    known = [f"Python {platform.python_version()}"]
    for names in PACKAGES:
        found = [f"{name} {number}" for name in names if (number := _version(name))]
        known.append(found[0] if found else f"{names[0]} absent")
    return ", ".join(known)


def settings(environment: Mapping[str, str]) -> str:
    """Returns the `CARE_…` settings of an environment, secrets left out."""
    own = {name: value for name, value in environment.items() if name.startswith("CARE_") and name not in SECRETS}
    return ", ".join(f"{name}={value}" for name, value in sorted(own.items()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output(*command: str) -> str:
    """Returns the output of a command, in English; empty if it fails or is not installed."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def process_tree(pid: int) -> list[int]:
    """Returns the process and all its living descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_lines(pid: int) -> dict[int, list[str]]:
    """Returns the command line of the process and of each descendant."""
    words = {}
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            words[one] = Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return words


def has_client(pid: int, port: int) -> bool:
    """Returns whether the process itself holds a connection that a client made to the port."""
    own = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(descriptor))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    accepted = [row[9] for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == ESTABLISHED]
    return any(f"socket:[{inode}]" in own for inode in accepted)


def descriptors(pid: int) -> int:
    """Open files and sockets of the process and its descendants."""
    number = 0
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            number += len(os.listdir(f"/proc/{one}/fd"))
    return number


def resident_mb(pid: int) -> float:
    """Resident megabytes of the process and its descendants; shared pages count once for each."""
    return sum(_mapped_mb(one, "Rss:") for one in process_tree(pid))


def private_mb(pid: int) -> float:
    """Megabytes that only this process maps."""
    return _mapped_mb(pid, "Private_")


def _mapped_mb(pid: int, beginning: str) -> float:
    """Returns the sum of the lines with that beginning; 0 if the process has ended."""
    try:
        # Not statm: its figures are rounded by what each core has not yet reported.
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(beginning)) * 1024 / 1e6


def processor_seconds(pid: int) -> float:
    """Processor time used so far by the process and its living descendants, to the nanosecond; /proc rounds it."""
    seconds = 0.0
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime(~one << 3 | PROCESSOR_CLOCK)
    return seconds


def main_thread_seconds(pid: int) -> float:
    """Processor time used so far by the first thread of the process, which runs the event loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def sampled(pid: int) -> Iterator[list[float]]:
    """Samples `resident_mb` at even intervals while the block runs, and once before and after."""
    samples = [resident_mb(pid)]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            samples.append(resident_mb(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        over.set()
        watcher.join()
        samples.append(resident_mb(pid))

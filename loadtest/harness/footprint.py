"""What a process and its descendants take, read from /proc while something else goes on: memory, processor time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

SAMPLE_SECONDS = 0.5
# As /proc/net/tcp writes it.
ESTABLISHED = "01"


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that live."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_lines(pid: int) -> dict[int, list[str]]:
    """The words by which the process and its descendants were started."""
    words = {}
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            words[one] = Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return words


def has_client(pid: int, port: int) -> bool:
    """Whether the process itself holds a connection that a client made to the port."""
    own = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(descriptor))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    accepted = [row[9] for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == ESTABLISHED]
    return any(f"socket:[{inode}]" in own for inode in accepted)


def resident_mb(pid: int) -> float:
    """Resident megabytes of the process and its descendants; pages that they share count once for each."""
    return sum(_mapped_mb(one, "Rss:") for one in process_tree(pid))


def private_mb(pid: int) -> float:
    """Megabytes that this one process holds alone: what would be free if it had never been started."""
    return _mapped_mb(pid, "Private_")


def _mapped_mb(pid: int, beginning: str) -> float:
    """The sum of the lines with that beginning; nothing of a process that is gone."""
    try:
        # Not statm: its figures are rounded by what each core has not yet reported.
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(beginning)) * 1024 / 1e6


def processor_seconds(pid: int) -> float:
    """Processor time that the process and its living descendants have used so far."""
    ticks = 0
    for one in process_tree(pid):
        with contextlib.suppress(OSError, IndexError):
            # The name before the figures may hold spaces; it ends with the last bracket.
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def sampled(pid: int) -> Iterator[list[float]]:
    """`resident_mb` at even intervals while the block runs."""
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

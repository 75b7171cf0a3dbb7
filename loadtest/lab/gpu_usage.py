"""How busy the graphics card is while something else goes on, as nvidia-smi says; nothing where there is none."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean

SAMPLE_MS = 200
FIELDS = "utilization.gpu,memory.used"


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Means over the samples: the share of the time in which a kernel ran, and megabytes in use."""

    busy: float
    memory_mb: float


@dataclass
class Watch:
    """Lines of nvidia-smi, complete after the block."""

    lines: list[str] = field(default_factory=list)

    def usage(self) -> GpuUsage | None:
        return read_usage(self.lines)


def read_usage(lines: list[str]) -> GpuUsage | None:
    """`busy per cent, megabytes` a line; None where there is no line."""
    samples = [[float(number) for number in line.split(",")] for line in lines if line.strip()]
    if not samples:
        return None
    return GpuUsage(mean(busy for busy, _ in samples) / 100, mean(memory for _, memory in samples))


@contextlib.contextmanager
def watch_gpu() -> Iterator[Watch]:
    """Samples while the block runs."""
    watch = Watch()
    command = _command(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLE_MS}", "--id=0")
    if command is None:
        yield watch
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield watch
        finally:
            process.terminate()
            # A sample a fifth of a second is far from filling the pipe within a load.
            watch.lines += (process.communicate()[0] or "").splitlines()


def gpu_name() -> str:
    """The card and its driver."""
    command = _command("--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0")
    if command is None:
        return "none"
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().replace(", ", ", driver ") if done.returncode == 0 else "none"


def _command(*arguments: str) -> list[str] | None:
    found = shutil.which("nvidia-smi")
    return None if found is None else [found, *arguments]

"""The device of a name; what it needs is imported only where it is asked for."""

from __future__ import annotations

from service.engine.device import Cpu, Device


def open_device(name: str, encoder_threads: int, threads: int) -> Device:
    """`cpu` or `cuda`; the threads are the processor's."""
    if name == "cuda":
        from service.engine.cuda import Cuda

        return Cuda()
    return Cpu(encoder_threads, threads)

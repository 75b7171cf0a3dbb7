"""The device of a name, and who searches vectors; what either needs is imported only where it is asked for."""

from __future__ import annotations

from indexer.store.collection import Database
from service.engine.device import Cpu, Device, OpenVectors


def open_device(name: str, encoder_threads: int, threads: int) -> Device:
    """`cpu` or `cuda`; the threads are the processor's."""
    if name == "cuda":
        from service.engine.cuda import Cuda

        return Cuda()
    return Cpu(encoder_threads, threads)


def searched_by(device: Device, database: Database | None = None) -> OpenVectors:
    """By the database where there is one, else by the device."""
    if database is not None:
        from service.engine.outside import open_outside

        return open_outside(database)
    return lambda snapshot: device.open_vectors(snapshot.vectors)

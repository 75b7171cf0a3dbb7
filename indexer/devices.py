"""Encodes on several devices of this machine without Ray: one process with an encoder for each.

The shards are the same lists of texts that one device would encode, so the vectors are the same. This process holds no
weights meanwhile; if it must encode later, queries say, the others have ended.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, cast

from indexer.encode import Encoder, encode_shard, read_ahead, reason_of
from indexer.errors import BadBuild
from indexer.store.shards import Shards
from models.encoder.onnx import Vectors
from models.encoder.spec import Computed, EncoderSpec, Side
from models.encoder.tokenizer import Tokenizer

ALL, CPU, CUDA = "all", "cpu", "cuda"
NAMES = re.compile(r"cpu|cuda(:\d+)?")
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
END_SECONDS = 10.0

Open = Callable[[str], Encoder]
"""Opens the encoder on cpu or cuda."""


def parse_devices(text: str) -> tuple[str, ...]:
    """Parses `cpu`, `cuda`, `cuda:1`, several of them with commas, or `all` GPUs; raises BadBuild."""
    names = tuple(f"{CUDA}:{number}" for number in range(_count_gpus())) if text == ALL else tuple(text.split(","))
    if text == ALL and not names:
        raise BadBuild("--device all: no GPU is seen here; leave it out to encode on the CPU")
    for name in names:
        if not NAMES.fullmatch(name):
            raise BadBuild(f"--device {text}: give cpu, cuda, cuda:N, several with commas, or {ALL}")
    return names


def _count_gpus() -> int:
    if (visible := os.environ.get(VISIBLE)) is not None:
        return len(list(filter(None, visible.split(","))))
    try:
        return int(import_module("torch").cuda.device_count())
    except ModuleNotFoundError:  # an environment for ONNX Runtime alone
        return len(list(GPU_FOLDERS.glob("*")))


def is_spread(devices: Sequence[str]) -> bool:
    """Returns whether the devices need processes of their own: several, or a certain GPU."""
    return len(devices) > 1 or any(":" in name for name in devices)


class Facts(NamedTuple):
    """What a build must know of an encoder that another process holds."""

    fingerprint: str
    spec: EncoderSpec
    variant: Computed
    tokenizer: Tokenizer
    bulk_texts: int


class DeviceEncoder:
    """An encoder (`indexer.encode.Encoder`) in one process for each device; `close` ends them."""

    def __init__(self, devices: Sequence[str], open_encoder: Open) -> None:
        """Starts the processes and returns when all have opened the encoder; raises BadBuild."""
        self._devices = devices
        self._open = open_encoder
        self._here: Encoder | None = None
        self._processes = []
        self._connections: dict[Connection, str] = {}
        context = get_context("spawn")
        try:
            for device in devices:
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(there, device, open_encoder), daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._connections[here] = device
            facts = [cast(Facts, self._receive(connection)) for connection in self._connections]
            first = facts[0]
            if others := [own for own, its in zip(devices, facts, strict=True) if its.fingerprint != first.fingerprint]:
                raise BadBuild(f"{others[0]} computes in another precision than {devices[0]}; name devices of one kind")
        except BaseException:
            self.close()
            raise
        self.fingerprint, self.spec, self.variant, self.tokenizer, self.bulk_texts = first

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Encodes in this process, on the first device."""
        self.close()
        if self._here is None:
            self._here = _open_on(self._devices[0], self._open)
        return self._here.encode(texts, side)

    def encode_shards(self, shards: Iterable[list[str]], encoder: Encoder, place: Shards) -> Iterator[int]:
        """As `indexer.encode.EncodeShards`; shards are finished in any order, and the processes end with the last."""
        idle, busy = list(self._connections), dict[Connection, int]()
        with closing(read_ahead(shards)) as waiting, closing(self):
            while True:
                while idle and (texts := next(waiting, None)) is not None:
                    connection = idle.pop()
                    self._send(connection, (texts, place))
                    busy[connection] = len(texts)
                if not busy:
                    return
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    self._receive(ready)
                    idle.append(ready)
                    yield busy.pop(ready)

    def close(self) -> None:
        """Ends the processes at once; what they have written stays."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_SECONDS)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], {}

    def _send(self, connection: Connection, work: tuple[list[str], Shards]) -> None:
        try:
            connection.send(work)
        except OSError:
            raise self._died(connection) from None

    def _receive(self, connection: Connection) -> object:
        """Returns what a process answers; raises BadBuild if it failed or died."""
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            raise self._died(connection) from None
        if isinstance(answer, BadBuild):
            raise BadBuild(f"{self._connections[connection]}: {answer}")
        return answer

    def _died(self, connection: Connection) -> BadBuild:
        reason = "its process died, perhaps because memory ran out"
        return BadBuild(
            f"{self._connections[connection]}: {reason}; run the same command again: what is encoded is kept"
        )


def _work(connection: Connection, device: str, open_encoder: Open) -> None:
    """Runs one device's process: opens the encoder, encodes and writes shards of texts, sends back their names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the build ends its processes
    try:
        encoder = _open_on(device, open_encoder)
        facts = Facts(encoder.fingerprint, encoder.spec, encoder.variant, encoder.tokenizer, encoder.bulk_texts)
        connection.send(facts)
        while True:
            texts, place = connection.recv()
            connection.send(encode_shard(texts, encoder, place))
    except EOFError:  # the build has ended
        return
    except Exception as error:
        connection.send(BadBuild(reason_of(error)))


def _open_on(device: str, open_encoder: Open) -> Encoder:
    """Opens the encoder on a device; a process that is given a GPU sees no other."""
    kind, _, number = device.partition(":")
    if number:
        visible = list(filter(None, os.environ.get(VISIBLE, "").split(",")))
        if visible and int(number) >= len(visible):
            raise BadBuild(f"{VISIBLE} shows {len(visible)} GPUs; name one from {CUDA}:0 on")
        os.environ[VISIBLE] = visible[int(number)] if visible else number
    return open_encoder(kind)

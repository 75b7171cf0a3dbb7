"""Encoders for tests with several device processes: one that records its calls, and one that kills its process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from models.encoder.onnx import Vectors
from models.encoder.spec import Side
from models.errors import BadEncoder
from tests.support.fast_encoder import FastEncoder

DEADLY = "第33种"


class RecordingEncoder(FastEncoder):
    """Writes a file named after its process and device into `folder` for every shard."""

    def __init__(self, folder: Path, device: str, *, deadly: bool) -> None:
        super().__init__(swayed=True)
        self._folder, self._device, self._deadly = folder, device, deadly

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        if self._deadly and any(text.startswith(DEADLY) for text in texts):
            os._exit(9)
        vectors = super().encode(texts, side)
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
        (self._folder / f"{os.getpid()}-{self._device}-{gpu}-{len(list(self._folder.iterdir()))}").touch()
        return vectors


def open_recording(folder: Path, device: str) -> RecordingEncoder:
    return RecordingEncoder(folder, device, deadly=False)


def open_deadly(folder: Path, device: str) -> RecordingEncoder:
    return RecordingEncoder(folder, device, deadly=True)


def open_nothing(device: str) -> FastEncoder:
    raise BadEncoder("there are no weights here")


def open_another(device: str) -> FastEncoder:
    return FastEncoder(f"fast on {device}")

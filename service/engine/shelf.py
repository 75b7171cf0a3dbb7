"""The servings that the engine process holds open: each is opened once, off the loop, and closed when nobody holds it.

A serving here is a snapshot and an encoder on the device. Workers name it by the handle that opening gave them.
Knows nothing of sockets or batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from indexer.store.collection import Collection
from models.errors import BadEncoder
from service.engine.device import Device, Encoder, VectorSearch
from service.engine.devices import searched_by
from service.serving import Serving, require_query_encoder
from service.settings import Settings

logger = logging.getLogger(__name__)

Name = tuple[str, str]
"""A snapshot's version and an encoder's fingerprint."""
Result = tuple["Name", "Held | Exception"]


@dataclass(slots=True, eq=False)
class Held:
    """One open serving; `holders` are the workers' openings that were not released yet."""

    handle: int
    serving: Serving
    encoder: Encoder
    vectors: VectorSearch
    holders: int = 0


class Shelf:
    """Used by the engine's one thread; opening alone happens in another, which calls `on_opened` from there."""

    def __init__(self, settings: Settings, device: Device, on_opened: Callable[[Result], None]) -> None:
        self._settings = settings
        self._device = device
        self._on_opened = on_opened
        self._opener = ThreadPoolExecutor(1, "care-open")
        self._open_vectors = searched_by(device, settings.database)
        self._encoder = device.load_encoder(require_query_encoder(settings.encoder))
        self._held: dict[int, Held] = {}
        self._opening: set[Name] = set()
        self._handles = 0

    @property
    def newest(self) -> Held | None:
        return self._held[max(self._held)] if self._held else None

    def get(self, handle: int) -> Held | None:
        return self._held.get(handle)

    def find(self, name: Name) -> Held | None:
        for held in self._held.values():
            if (held.serving.version, held.serving.encoder.fingerprint) == name:
                return held
        return None

    def open(self, name: Name) -> None:
        """Begins to open a serving that is not there; the result goes to `on_opened`, and from there to `put`."""
        if name not in self._opening:
            self._opening.add(name)
            self._opener.submit(self._open, name)

    def put(self, result: Result) -> Held | Exception:
        """Takes what the opener made."""
        name, opened = result
        self._opening.discard(name)
        if isinstance(opened, Held):
            self._encoder = opened.encoder
            self._held[opened.handle] = opened
            self._drop_unheld()
        return opened

    def release(self, handle: int) -> None:
        if (held := self._held.get(handle)) is not None:
            held.holders -= 1
            self._drop_unheld()

    def close(self) -> None:
        self._opener.shutdown(wait=False, cancel_futures=True)

    def _drop_unheld(self) -> None:
        # The newest stays even while nobody holds it: who asks next, after all workers died, will ask for it.
        newest = max(self._held, default=0)
        for handle in [number for number, held in self._held.items() if held.holders <= 0 and number != newest]:
            logger.info("snapshot %s is let go", self._held.pop(handle).serving.version)

    def _open(self, name: Name) -> None:
        try:
            self._on_opened((name, self._load(*name)))
        except Exception as error:
            self._on_opened((name, error))

    def _load(self, version: str, fingerprint: str) -> Held:
        settings, encoder = self._settings, self._encoder
        if encoder.reader.fingerprint != fingerprint:
            encoder = self._device.load_encoder(require_query_encoder(settings.encoder))
        if encoder.reader.fingerprint != fingerprint:
            raise BadEncoder(f"{settings.encoder} changed while it was opened; reload once more")
        folder = Collection(settings.collection).folder(version)
        serving = Serving.open(folder, encoder.reader, verify=settings.verify)
        vectors = self._open_vectors(serving.snapshot)
        self._handles += 1
        return Held(self._handles, serving, encoder, vectors)

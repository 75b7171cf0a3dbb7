"""Swaps the serving of new requests when the collection's pointer moves.

A new serving takes over only after a real query went through it. One that cannot be opened leaves a log line and a
metric, and the old one stays.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from indexer.errors import BadCollection, BadDisk, BadSnapshot, DatabaseAway
from indexer.store.canaries import Canary, kept_canaries
from indexer.store.collection import Collection
from models.encoder.pairs import PairReader
from models.encoder.tokenizer import TextReader
from models.errors import BadEncoder, CareError, SpaceMismatch
from service.errors import NotKept, NotReady
from service.serving.serving import Current, Models, Serving, are_current

if TYPE_CHECKING:
    from service.metrics import Metrics
    from service.settings import Settings

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.2  # between two looks at the log of posted documents
PERMANENT = (BadCollection, BadSnapshot, BadEncoder, SpaceMismatch)
# A crowd of connections may take every descriptor for a while.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Attempts after any other error: an engine that died is back soon, but must not die of one version again and again.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Opening:
    """The steps to a serving: load the models again, open the snapshot, prepare the engine, apply the log, send a
    real query, and ask the canaries of a rollback."""

    load_models: Callable[[], Models]
    open: Callable[[Path, TextReader, PairReader | None], Serving]
    prepare: Callable[[Serving], Awaitable[None]]
    freshen: Callable[[Serving], Awaitable[Serving]]
    probe: Callable[[Serving], Awaitable[None]]
    check_canaries: Callable[[Serving, Sequence[Canary]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that is not served, the reason, and how many automatic attempts are left."""

    version: str
    reason: str
    tries_left: float


class Servings:
    """Replaces the current serving. One change at a time."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        models: Models,
        opening: Opening,
        tell_others: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell_others` makes other processes follow an administrator's request."""
        self.current = Current()
        self.collection = Collection(settings.collection, settings.database)
        self._settings = settings
        self._metrics = metrics
        self._models = models
        self._opening = opening
        self._tell_others = tell_others
        self._refused: Refusal | None = None
        self._changing = asyncio.Lock()
        self._freshening = asyncio.Lock()
        self._log_trouble = self._pointer_trouble = ""

    @property
    def serving(self) -> str | None:
        """The version that requests are answered from."""
        return None if self.current.serving is None else self.current.serving.version

    def refusal_of(self, version: str | None) -> str | None:
        """Returns why a version was refused, None if it was not."""
        return self._refused.reason if self._refused and self._refused.version == version else None

    async def start(self) -> None:
        """Serves what the pointer names; raises if that cannot be served."""
        version = await asyncio.to_thread(self.collection.current)
        if version is None:
            logger.warning("%s has no published snapshot yet; waiting for one", self.collection.root)
            return
        await self._put_in_service(await self._prepare(version))

    async def reload(self) -> bool:
        """Serves what the pointer names, in all workers; False if that is served already."""
        changed = await self._reload()
        self._tell_others()
        return changed

    async def _reload(self) -> bool:
        async with self._changing:
            version = await self._published()
            if version is None:
                raise NotReady("no snapshot is published; care index build makes one")
            if version == self.serving and await asyncio.to_thread(self._models_are_current):
                return False
            await self._swap_to(version)
            return True

    async def rollback(self, version: str | None, *, force: bool = False) -> bool:
        """Serves an older version in all workers, and moves the pointer to it.

        The pointer moves last: other processes follow it, so until then the version must open, answer a query and,
        unless forced, pass the canaries of the collection.
        """
        async with self._changing:
            target = await asyncio.to_thread(self.collection.rollback_target, version)
            changed = target != self.serving
            canaries = [] if force else await asyncio.to_thread(kept_canaries, self.collection.root)
            if changed:
                await self._swap_to(target, canaries, move_pointer=True)
            else:
                await self._move_pointer(target)
        self._tell_others()
        return changed

    async def follow_now(self, *, requested: bool = True) -> None:
        """Serves what the pointer names. Unless `requested` by an administrator, a refused version is left alone."""
        try:
            version = None if requested else await self._published()
            if requested or (version not in (None, self.serving) and self._tries_left(version) > 0):
                await self._reload()
        except CareError:
            pass  # logged already, and shown by /admin/versions
        except Exception:
            logger.exception("following the pointer of %s failed", self.collection.root)

    async def follow_pointer(self, seconds: float) -> None:
        """Polls the pointer until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await self.follow_now(requested=False)

    async def catch_up(self) -> None:
        """Serves all documents of the log; raises BadLog."""
        async with self._freshening:
            if self.current.serving is not None:
                self._freshen_to(await self._opening.freshen(self.current.serving))

    async def follow_log(self) -> None:
        """Polls the log until cancelled; an error is logged once."""
        while True:
            await asyncio.sleep(LOG_SECONDS)
            try:
                await self.catch_up()
                self._log_trouble = ""
            except Exception as error:
                if str(error) != self._log_trouble:
                    self._log_trouble, unexpected = str(error), not isinstance(error, CareError)
                    logger.error("fresh documents are not followed: %s", error, exc_info=unexpected)

    async def _published(self) -> str | None:
        """Returns what the pointer names; raises BadCollection, which is logged and counted once."""
        try:
            version = await asyncio.to_thread(self.collection.current)
        except BadCollection as error:
            if str(error) != self._pointer_trouble:
                self._pointer_trouble = self.current.missing = str(error)
                self._metrics.failed_swap()
                logger.error("%s stays in service: %s", self.serving, error)
            raise
        self._pointer_trouble = ""
        return version

    async def _swap_to(self, version: str, canaries: Sequence[Canary] = (), *, move_pointer: bool = False) -> None:
        try:
            serving = await self._prepare(version)
            await self._opening.check_canaries(serving, canaries)
            if move_pointer:
                await self._move_pointer(version)
            await self._put_in_service(serving)
        except Exception as error:
            reason = str(error) if isinstance(error, CareError) else "it failed unexpectedly; the log says how"
            self._refused = Refusal(version, reason, self._tries_left(version, error))
            self.current.missing = reason
            self._metrics.failed_swap()
            logger.error("snapshot %s is refused, %s stays in service: %s", version, self.serving, reason)
            raise

    async def _move_pointer(self, version: str) -> None:
        try:
            await asyncio.to_thread(self.collection.rollback, version)
        except (OSError, BadDisk) as error:  # a service that only searches may have a read-only collection
            logger.error("the pointer was not moved to %s: %s", version, error)
            raise NotKept("the disk does not take the rollback; the service's log says why") from None

    def _tries_left(self, version: str | None, error: Exception | None = None) -> float:
        """Returns how many attempts a version has left, after this error."""
        if isinstance(error, DatabaseAway) or _is_exhausted(error):
            return math.inf
        if isinstance(error, PERMANENT):
            return 0
        before = self._refused.tries_left if self._refused and self._refused.version == version else TRIES
        return before if error is None else before - 1

    async def _prepare(self, version: str) -> Serving:
        serving = await asyncio.to_thread(self._open, version)
        await self._opening.prepare(serving)
        serving = await self._opening.freshen(serving)
        await self._opening.probe(serving)
        return serving

    async def _put_in_service(self, serving: Serving) -> None:
        async with self._freshening:
            # Once more: documents that came during the probe were visible in the serving before.
            self._freshen_to(await self._opening.freshen(serving))
        self._refused, self._models = None, Models(serving.encoder, serving.reranker)
        snapshot = serving.snapshot
        self._metrics.swap(serving.version, len(snapshot.documents), snapshot.manifest.created.timestamp())
        logger.info("snapshot %s is in service", serving.version)

    def _freshen_to(self, serving: Serving) -> None:
        self.current.serving = serving
        self._metrics.fresh(serving.overlay.changes)

    def _open(self, version: str) -> Serving:
        models = self._models if self._models_are_current() else self._opening.load_models()
        return self._opening.open(self.collection.folder(version), *models)

    def _models_are_current(self) -> bool:
        return are_current(self._models, self._settings.encoder, self._settings.reranker)


def _is_exhausted(error: BaseException | None) -> bool:
    """Returns whether this process, not the version, lacked something: free descriptors or memory for a map."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            return True
        error = error.__cause__
    return False

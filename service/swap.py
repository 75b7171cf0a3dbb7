"""Which serving new requests get, and how it changes while they are answered.

The pointer of the collection is looked at every few seconds; an administrator may ask at once. A new serving takes
over only after a real query went through it; one that cannot be opened changes nothing but a log line and a metric.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from indexer.errors import BadCollection, BadSnapshot, DatabaseAway
from indexer.store.canaries import Canary, kept_canaries
from indexer.store.collection import Collection
from models.errors import BadEncoder, CareError, SpaceMismatch
from models.reader import TextReader
from service.errors import NotReady
from service.metrics import Metrics
from service.serving import Serving, is_same_function
from service.settings import Settings

logger = logging.getLogger(__name__)

# Between two looks at the log of fresh documents.
LOG_SECONDS = 0.2
# What is wrong with a snapshot today is wrong with it tomorrow.
VERDICTS = (BadCollection, BadSnapshot, BadEncoder, SpaceMismatch)
# So often a version is tried that failed for another reason: an engine that died meanwhile is back soon, but one that
# dies of this version must not die of it again and again.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Opening:
    """The steps to a serving: the encoder's folder once more, a snapshot for an encoder, the engine's share of it, what
    the log has beyond it, a real query through all, and the queries that a rollback must answer."""

    load_encoder: Callable[[], TextReader]
    open: Callable[[Path, TextReader], Serving]
    prepare: Callable[[Serving], Awaitable[None]]
    freshen: Callable[[Serving], Awaitable[Serving]]
    probe: Callable[[Serving], Awaitable[None]]
    check_canaries: Callable[[Serving, Sequence[Canary]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that is not served, why, and how often it will still be tried without being asked for."""

    version: str
    reason: str
    tries_left: float


class Servings:
    """Holds the current serving and replaces it. One change at a time."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        encoder: TextReader,
        opening: Opening,
        tell_others: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell_others` has other processes follow what an administrator did here."""
        self.collection = Collection(settings.collection, settings.database)
        self._settings = settings
        self._metrics = metrics
        self._encoder = encoder
        self._opening = opening
        self._tell_others = tell_others
        self._current: Serving | None = None
        self._refused: Refusal | None = None
        self._changing = asyncio.Lock()
        self._freshening = asyncio.Lock()
        self._log_trouble = ""

    @property
    def serving(self) -> str | None:
        """The version that requests are answered from."""
        return None if self._current is None else self._current.version

    def refusal_of(self, version: str | None) -> str | None:
        """Why a version is not served, None where it was not refused."""
        return self._refused.reason if self._refused and self._refused.version == version else None

    def current(self) -> Serving:
        if self._current is None:
            reason = self._refused.reason if self._refused else "none is published; care index build makes one"
            raise NotReady(f"no snapshot is served: {reason}")
        return self._current

    async def start(self) -> None:
        """Serves what the pointer names, or raises: who starts the service says why it does not start."""
        version = await asyncio.to_thread(self.collection.current)
        if version is None:
            logger.warning("%s has no published snapshot yet; waiting for one", self.collection.root)
            return
        await self._put_in_service(await self._prepare(version))

    async def reload(self) -> bool:
        """Serves what the pointer names now, and has the other workers do so; False where that is served already."""
        changed = await self._reload()
        self._tell_others()
        return changed

    async def _reload(self) -> bool:
        async with self._changing:
            version = await asyncio.to_thread(self.collection.current)
            if version is None:
                raise NotReady("no snapshot is published; care index build makes one")
            if version == self.serving and await asyncio.to_thread(self._encoder_is_current):
                return False
            await self._swap_to(version)
            return True

    async def rollback(self, version: str | None, *, force: bool = False) -> bool:
        """Moves the pointer to an older version and serves it everywhere; one that cannot be served is undone.

        A version that fails a canary of the collection is not served unless forced.
        """
        async with self._changing:
            before = await asyncio.to_thread(self.collection.current)
            target = await asyncio.to_thread(self.collection.rollback, version)
            changed = target != self.serving
            try:
                if changed:
                    canaries = [] if force else await asyncio.to_thread(kept_canaries, self.collection.root)
                    await self._swap_to(target, canaries)
            except Exception:
                if before is not None:
                    await asyncio.to_thread(self.collection.rollback, before)
                raise
        self._tell_others()
        return changed

    async def follow_now(self) -> None:
        """Serves what the pointer names, because an administrator asked another process to."""
        try:
            await self._reload()
        except CareError:
            pass  # said in the log by the swap, and shown by /admin/versions
        except Exception:
            logger.exception("following the pointer of %s failed", self.collection.root)

    async def follow_pointer(self, seconds: float) -> None:
        """Looks every so many seconds until cancelled. A version that was refused for good is left alone."""
        while True:
            await asyncio.sleep(seconds)
            try:
                version = await asyncio.to_thread(self.collection.current)
                if version not in (None, self.serving) and self._tries_left(version) > 0:
                    await self._reload()
            except CareError:
                pass  # said in the log by the swap, and shown by /admin/versions
            except Exception:
                logger.exception("looking at the pointer of %s failed", self.collection.root)

    async def catch_up(self) -> None:
        """Serves what the log of fresh documents holds now; raises BadLog."""
        async with self._freshening:
            if self._current is not None:
                self._freshen_to(await self._opening.freshen(self._current))

    async def follow_log(self) -> None:
        """Looks several times a second until cancelled; trouble is said once."""
        while True:
            await asyncio.sleep(LOG_SECONDS)
            try:
                await self.catch_up()
                self._log_trouble = ""
            except Exception as error:
                if str(error) != self._log_trouble:
                    self._log_trouble = str(error)
                    logger.error(
                        "fresh documents are not followed: %s", error, exc_info=not isinstance(error, CareError)
                    )

    async def _swap_to(self, version: str, canaries: Sequence[Canary] = ()) -> None:
        try:
            serving = await self._prepare(version)
            await self._opening.check_canaries(serving, canaries)
            await self._put_in_service(serving)
        except Exception as error:
            reason = str(error) if isinstance(error, CareError) else "it failed unexpectedly; the log says how"
            self._refused = Refusal(version, reason, self._tries_left(version, error))
            self._metrics.failed_swap()
            logger.error("snapshot %s is refused, %s stays in service: %s", version, self.serving, reason)
            raise

    def _tries_left(self, version: str | None, error: Exception | None = None) -> float:
        """How often a version is worth a try, after this error."""
        if isinstance(error, VERDICTS):
            return 0
        if isinstance(error, DatabaseAway):
            return math.inf  # it will be back
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
            # Once more: what came during the probe was seen in the serving before, and must not vanish.
            self._freshen_to(await self._opening.freshen(serving))
        self._refused, self._encoder = None, serving.encoder
        self._metrics.swap(serving.version, len(serving.snapshot.documents))
        logger.info("snapshot %s is in service", serving.version)

    def _freshen_to(self, serving: Serving) -> None:
        self._current = serving
        self._metrics.fresh(0 if serving.fresh is None else serving.fresh.changes)

    def _open(self, version: str) -> Serving:
        folder = self.collection.folder(version)
        encoder = self._encoder
        if not self._encoder_is_current():
            encoder = self._opening.load_encoder()
        return self._opening.open(folder, encoder)

    def _encoder_is_current(self) -> bool:
        return is_same_function(self._settings.encoder, self._encoder)

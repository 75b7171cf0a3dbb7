"""Documents in and out while the service runs: checked, encoded, logged, laid over. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from indexer.store import Change, Deleted, FreshLog, NotWritten
from indexer.store.values import kind_of
from service.errors import FreshLimit, InvalidRequest, NotKept
from service.fresh.encode import DocumentEncoder, NewDocument
from service.serving import Serving
from service.settings import Settings
from service.swap import Servings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far the log is, and how many documents are now otherwise than before; both survive whatever happens next."""

    position: int
    changed: int
    snapshot: str


class FreshWriter:
    """Changes the collection of a running service."""

    def __init__(self, settings: Settings, servings: Servings, encoder: DocumentEncoder, log: FreshLog) -> None:
        self._limit = settings.fresh_limit
        self._servings = servings
        self._encoder = encoder
        self._log = log

    async def post(self, documents: Sequence[NewDocument]) -> Receipt:
        """Adds documents, or replaces those of the same id: all of them, or none where this raises."""
        serving = await self._newest()
        _check_ids(documents)
        changed = [document for document in documents if not _is_posted(serving, document)]
        _check_kinds(serving, changed)
        count = 0 if serving.fresh is None else serving.fresh.changes
        if changed and count + len(changed) > self._limit:
            raise FreshLimit(f"{count} documents changed since the snapshot was built, {self._limit} may: re-index")
        return await self._append(serving, await self._encoder.encode(serving, changed))

    async def delete(self, document_id: str) -> Receipt:
        """Takes a document away; nothing is changed where there is none."""
        serving = await self._newest()
        return await self._append(serving, [] if serving.row_of(document_id) is None else [Deleted(document_id)])

    async def _newest(self) -> Serving:
        """Another process may have written a moment ago, and what is checked here is checked against that too."""
        await self._servings.catch_up()
        return self._servings.current()

    async def _append(self, serving: Serving, changes: Sequence[Change]) -> Receipt:
        if not changes:
            return Receipt(serving.cursor.position, 0, serving.version)
        included = serving.snapshot.manifest.fresh.position
        try:
            position = await asyncio.to_thread(self._log.append, changes, included)
        except NotWritten as error:
            logger.error("%s", error)
            raise NotKept("the disk does not take the change, so it was not made; the service's log says why") from None
        await self._servings.catch_up()
        return Receipt(position, len(changes), serving.version)


def _is_posted(serving: Serving, document: NewDocument) -> bool:
    """Whether the log says already what is posted. What only the snapshot says is put on record: the next may not."""
    row = None if serving.fresh is None else serving.fresh.rows.get(document.id)
    return row is not None and serving.document(row) == document.stored()


def _check_ids(documents: Sequence[NewDocument]) -> None:
    known: dict[str, int] = {}
    for number, document in enumerate(documents):
        first = known.setdefault(document.id, number)
        if first != number:
            raise InvalidRequest(f"documents[{number}]", f"has the id of documents[{first}]")


def _check_kinds(serving: Serving, documents: Sequence[NewDocument]) -> None:
    """One field holds one kind of value in all documents, as in a corpus."""
    kinds = serving.snapshot.metadata.kinds
    kinds |= {} if serving.fresh is None else serving.fresh.kinds
    for number, document in enumerate(documents):
        for name, value in document.metadata.items():
            if value is not None and kind_of(value) != (known := kinds.setdefault(name, kind_of(value))):
                raise InvalidRequest(
                    "documents", f"[{number}] metadata field {name} is {kind_of(value)} here and {known} elsewhere"
                )

"""Adds and deletes documents while the service runs: checks, encodes and logs them, and makes them searchable."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from indexer.errors import BadDisk, NotWritten
from indexer.store.documents import StoredDocument
from indexer.store.filters import MAX_FIELDS, Filter, Metadata, has_value, kind_of
from indexer.store.fresh_log import Change, Decide, Deleted, Frame, FreshLog, NewDocument, Posted
from indexer.store.metadata import admits
from indexer.store.overlay import passages_of
from service.errors import FreshLimit, IdTaken, InvalidRequest, NotKept
from service.updates.encoder import DocumentEncoder

if TYPE_CHECKING:
    from service.serving.serving import Serving
    from service.settings import Settings
    from service.updates.swap import Servings

logger = logging.getLogger(__name__)


class ChangesAnswer(BaseModel):
    """What was done, and is on the disk; in every worker's answers within a second."""

    position: int = Field(description="How far the log of changes is with this one.")
    changed: int = Field(description="How many documents are now otherwise than before.")
    snapshot: str


class _Sealed(Exception):
    """A build began while documents were encoded: it may hold what the log had before."""


class FreshWriter:
    """Changes the collection of a running service.

    Checks everything twice: before documents are encoded, and under the log's lock against later records.
    """

    def __init__(self, settings: Settings, servings: Servings, encoder: DocumentEncoder, log: FreshLog) -> None:
        self._limit = settings.fresh_limit
        self._servings = servings
        self._encoder = encoder
        self._log = log

    async def post(self, documents: Sequence[NewDocument], within: tuple[Filter, ...] = ()) -> ChangesAnswer:
        """Adds documents or replaces those of equal id: all of them, or none if this raises.

        Raises IdTaken if one would replace a document that the filters `within` leave out.
        """
        _check_ids(documents)
        while True:
            with contextlib.suppress(_Sealed):
                return await self._post(documents, within)

    async def _post(self, documents: Sequence[NewDocument], within: tuple[Filter, ...]) -> ChangesAnswer:
        serving = await self._newest()
        sealed = await asyncio.to_thread(self._log.last_segment)
        now = _Known(serving)
        if within:
            await asyncio.to_thread(now.require_own, documents, within)
        await asyncio.to_thread(_check_kinds, now, documents, within)
        new = [each for each in documents if not now.holds(each.id, each.stored(), sealed)]
        posted = await self._encoder.encode(serving, new, partial(self._check_room, now))
        encoded = {each.id: each for each in posted}
        changed = 0

        def decide(frames: Sequence[Frame], segment: int) -> list[Change]:
            nonlocal changed
            known = _Known(serving, frames)
            if within:
                known.require_own(documents, within)
            _check_kinds(known, documents, within)
            unwritten = [each for each in documents if not known.holds(each.id, each.stored(), segment)]
            if any(each.id not in encoded for each in unwritten):
                raise _Sealed
            self._check_room(known, sum(len(encoded[each.id].spans) for each in unwritten))
            changed = sum(not known.holds(each.id, each.stored()) for each in unwritten)
            return [encoded[each.id] for each in unwritten]

        position = await self._change(serving, decide)
        return ChangesAnswer(position=position, changed=changed, snapshot=serving.version)

    async def delete(self, document_id: str, within: tuple[Filter, ...] = ()) -> ChangesAnswer:
        """Deletes a document. One that is not served is logged too: a running build or an older version may hold it.

        With filters `within`, only a served document that they admit: the owner of an unserved one is unknown.
        """
        serving = await self._newest()
        changed = 0

        def decide(frames: Sequence[Frame], segment: int) -> list[Change]:
            nonlocal changed
            known = _Known(serving, frames)
            if within and not known.is_within(document_id, within):
                return []
            changed = int(known.is_visible(document_id))
            return [] if known.holds(document_id, None, segment) else [Deleted(document_id)]

        position = await self._change(serving, decide)
        return ChangesAnswer(position=position, changed=changed, snapshot=serving.version)

    async def _newest(self) -> Serving:
        """Returns the serving with what other processes wrote a moment ago."""
        await self._servings.catch_up()
        return self._servings.current()

    def _check_room(self, known: _Known, passages: int) -> None:
        if passages and known.passages + passages > self._limit:
            raise FreshLimit(
                f"{known.passages} passages were posted since the snapshot was built, these are {passages} more, and "
                f"{self._limit} may be (CARE_FRESH_LIMIT): re-index"
            )

    async def _change(self, serving: Serving, decide: Decide) -> int:
        included = serving.snapshot.manifest.fresh.position
        try:
            position = await asyncio.to_thread(self._log.change, serving.cursor, decide, included)
        except (NotWritten, BadDisk) as error:
            logger.error("%s", error)
            raise NotKept("the disk does not take the change, so it was not made; the service's log says why") from None
        await self._servings.catch_up()
        return position


class _Known:
    """The documents of a serving and of later frames of the log."""

    def __init__(self, serving: Serving, frames: Sequence[Frame] = ()) -> None:
        self._serving = serving
        self._later = {change.id: (frame.position, change) for frame in frames for change in frame.changes}
        self.passages = serving.overlay.posted + sum(map(passages_of, frames))

    def kinds_without(self, ids: Collection[str]) -> dict[str, str]:
        """Returns the kind of each field that some document has, without the documents of these ids."""
        kinds = self._serving.overlay.kinds_without({*self._later, *ids})
        for _, change in self._later.values():
            if isinstance(change, Posted) and change.id not in ids:
                kinds = {name: kind_of(value) for name, value in change.metadata.items() if has_value(value)} | kinds
        return kinds

    def holds(self, document_id: str, content: StoredDocument | None, since: int = 0) -> bool:
        """Returns whether the log holds this content of an id (None: deleted) at position `since` or later.

        An earlier segment may be part of a version already, which the corpus may have changed again.
        """
        position, stored = self._last(document_id)
        return position is not None and position >= since and stored == content

    def is_visible(self, document_id: str) -> bool:
        position, stored = self._last(document_id)
        return stored is not None if position is not None else self._serving.overlay.row_of(document_id) is not None

    def is_within(self, document_id: str, within: tuple[Filter, ...]) -> bool:
        """Returns whether a document is visible and the filters admit it."""
        metadata = self._metadata(document_id)
        return metadata is not None and admits(within, metadata)

    def require_own(self, documents: Sequence[NewDocument], within: tuple[Filter, ...]) -> None:
        """Raises IdTaken for a document that would replace one which the filters leave out."""
        for number, document in enumerate(documents):
            metadata = self._metadata(document.id)
            if metadata is not None and not admits(within, metadata):
                raise IdTaken(f"documents[{number}]: its id is taken; begin ids with a name of your own")

    def _metadata(self, document_id: str) -> Metadata | None:
        """Returns the metadata of the visible document with this id."""
        position, stored = self._last(document_id)
        if position is None and (row := self._serving.overlay.row_of(document_id)) is not None:
            stored = self._serving.overlay.document(row)
        return None if stored is None else stored.metadata

    def _last(self, document_id: str) -> tuple[int | None, StoredDocument | None]:
        """Finds the log position of a document's last change, None if it has none, and its content, None if deleted."""
        if document_id in self._later:
            position, change = self._later[document_id]
            return position, change.stored() if isinstance(change, Posted) else None
        overlay = self._serving.overlay
        row = overlay.rows.get(document_id)
        return overlay.positions.get(document_id), None if row is None else overlay.document(row)


def _check_ids(documents: Sequence[NewDocument]) -> None:
    known: dict[str, int] = {}
    for number, document in enumerate(documents):
        first = known.setdefault(document.id, number)
        if first != number:
            raise InvalidRequest(f"documents[{number}]", f"has the id of documents[{first}]")


def _check_kinds(known: _Known, documents: Sequence[NewDocument], within: tuple[Filter, ...]) -> None:
    """Checks that each field has one kind of value in all documents, without those that are replaced.

    With filters `within` the messages count no fields: others' are among them.
    """
    kinds = known.kinds_without({document.id for document in documents})
    known_fields = len(kinds)
    for number, document in enumerate(documents):
        for name, value in document.metadata.items():
            if has_value(value) and kind_of(value) != (kind := kinds.setdefault(name, kind_of(value))):
                path = f"documents[{number}].metadata"
                raise InvalidRequest(path, f"field {name} is {kind_of(value)} here and {kind} elsewhere")
    if len(kinds) > MAX_FIELDS and len(kinds) > known_fields:
        count = f"more than {MAX_FIELDS}" if within else len(kinds)
        raise InvalidRequest(
            "documents",
            f"with them the collection has {count} metadata fields, and at most {MAX_FIELDS} can be "
            "filtered by; put rare facts into the text, or into one field as a list of texts",
        )

"""Changes that the service's log of posted and deleted documents makes to a build.

The log wins in the first build that reads it. After that a posted document stays while the corpus lacks its id, a
deleted one stays out while the corpus has it, and a document that both have is the corpus's. A snapshot tells the next
build how many of its last documents no corpus had, and which ids of the corpus are deleted (`withdrawn.json`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from indexer.errors import BadSnapshot
from indexer.store.collection import Collection
from indexer.store.documents import DOCUMENTS_FILES, Documents, StoredDocument
from indexer.store.files import DiskDict
from indexer.store.fresh_log import Cursor, Posted
from indexer.store.manifest import Manifest

WITHDRAWN_FILE = "withdrawn.json"


@dataclass
class LogChanges:
    """The log's changes by id, up to `position`; `met` collects the ids that the corpus has, or may have, too."""

    position: int = 0
    posted: dict[str, Posted] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    met: set[str] = field(default_factory=set)
    _base: Documents | None = None
    _kept: int = 0

    @classmethod
    def read(cls, collection: Collection) -> LogChanges:
        """Seals the log first: frames that this build holds and later ones lie in different segments."""
        log = cls(collection.fresh_log.seal())
        since = 0
        if base := _base(collection):
            folder, manifest, log._base = base
            since, log._kept = manifest.fresh.position, manifest.fresh.posted
            log.position = max(log.position, since)
            if (withdrawn := folder / WITHDRAWN_FILE).exists():
                log.deleted.update(orjson.loads(withdrawn.read_bytes()))
        frames, _ = collection.fresh_log.read(Cursor(since))
        for change in (change for frame in frames if frame.position <= log.position for change in frame.changes):
            if isinstance(change, Posted):
                log.deleted.discard(change.id)
                log.posted[change.id] = change
            else:
                log.posted.pop(change.id, None)
                log.deleted.add(change.id)
        return log

    def decides(self, document_id: str) -> bool:
        """Returns whether the corpus's document of this id is left out; remembers that the corpus has it."""
        if document_id not in self:
            return False
        self.met.add(document_id)
        return True

    def meet_rejected(self, document_id: str | None) -> None:
        """Keeps the deletion of an id whose row was rejected: the corpus has it. None may be any id.

        A posted document in such a row is still in no corpus.
        """
        self.met |= self.deleted if document_id is None else self.deleted & {document_id}

    def __contains__(self, document_id: object) -> bool:
        return document_id in self.posted or document_id in self.deleted

    def documents(self, ids: DiskDict) -> Iterator[tuple[Posted | StoredDocument, bool]]:
        """Yields posted documents, and whether the corpus (whose ids are in `ids`) lacks their id; those come last."""
        for change in sorted(self.posted.values(), key=lambda change: change.id not in self.met):
            ids.add(change.id, 0)
            yield change, change.id not in self.met
        if self._base is not None:
            for row in range(len(self._base) - self._kept, len(self._base)):
                stored = self._base.get(row)
                if stored.id not in self.deleted and ids.add(stored.id, 0) is None:
                    yield stored, True

    def write_withdrawn(self, folder: Path) -> None:
        """Writes the ids that the corpus has and that stay out; no file if there are none."""
        if withdrawn := sorted(self.deleted & self.met):
            (folder / WITHDRAWN_FILE).write_bytes(orjson.dumps(withdrawn))


def _base(collection: Collection) -> tuple[Path, Manifest, Documents] | None:
    """Finds the version to continue from: the served one, else the newest sound one; the log covers the oldest."""
    versions = sorted(collection.versions(), key=lambda version: (version == collection.current(), version))
    for version in reversed(versions):
        folder = collection.folder(version)
        try:
            manifest = Manifest.read(folder)
            manifest.verify_files(folder, (*(DOCUMENTS_FILES if manifest.fresh.posted else ()), WITHDRAWN_FILE))
            return folder, manifest, Documents.open(folder, manifest.counts.documents)
        except BadSnapshot:
            continue
    return None

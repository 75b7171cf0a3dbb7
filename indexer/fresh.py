"""What a build makes of the documents that the service was given since: the log's word beside the corpus's.

In the build that reads it the log's word holds: what was posted is in, in the posted form; what was deleted is out.
After that, a posted document stays while the corpus does not have its id, a deleted one stays away while the corpus
still has it, and a document that both have is the corpus's. So a snapshot keeps two things for the next build: how many
of its last documents no corpus had, and the ids that a corpus has and nobody may see (`withdrawn.json`).
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
from indexer.store.manifest import Manifest, verify_file
from indexer.store.writer import WITHDRAWN_FILE


@dataclass(frozen=True)
class Given:
    """A document from the service; `kept`: no corpus has its id, so the next build must find it in this snapshot."""

    id: str
    title: str
    text: str
    metadata: dict[str, object]
    kept: bool


@dataclass
class LogWord:
    """What the log says of ids, up to `position`, and what the snapshot before keeps for this build.

    `met` collects the ids that the corpus has too.
    """

    position: int = 0
    posted: dict[str, Posted] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    met: set[str] = field(default_factory=set)
    _kept: tuple[Documents, int] | None = None

    @classmethod
    def read(cls, collection: Collection) -> LogWord:
        """Seals the log, so that what is included and what is not lie in different segments."""
        position = collection.fresh_log.seal()
        base = _base(collection)
        word = cls(position)
        if base is not None:
            folder, manifest, documents = base
            word = cls(max(position, manifest.fresh.position), _kept=(documents, manifest.fresh.posted))
            word.deleted.update(read_withdrawn(folder))
        frames, _ = collection.fresh_log.read(Cursor(base[1].fresh.position if base else 0))
        for frame in frames:
            if frame.position <= word.position:
                for change in frame.changes:
                    word._take(change.id, change if isinstance(change, Posted) else None)
        return word

    def decides(self, document_id: str) -> bool:
        """Whether the corpus's document of this id is left out; remembers that the corpus has it."""
        if document_id not in self.posted and document_id not in self.deleted:
            return False
        self.met.add(document_id)
        return True

    def documents(self, ids: DiskDict) -> Iterator[Given]:
        """What the service was given, once the corpus is read and `ids` has its ids; those to be kept come last."""
        for change in sorted(self.posted.values(), key=lambda change: change.id not in self.met):
            ids.add(change.id, 0)
            yield Given(change.id, change.title, change.text, dict(change.metadata), change.id not in self.met)
        for stored in self._kept_documents():
            if stored.id not in self.deleted and ids.add(stored.id, 0) is None:
                yield Given(stored.id, stored.title, stored.text, stored.metadata, kept=True)

    def withdrawn(self) -> list[str]:
        """The ids that the corpus has and that stay away."""
        return sorted(self.deleted & self.met)

    def _take(self, document_id: str, posted: Posted | None) -> None:
        if posted is None:
            self.posted.pop(document_id, None)
            self.deleted.add(document_id)
        else:
            self.deleted.discard(document_id)
            self.posted[document_id] = posted

    def _kept_documents(self) -> Iterator[StoredDocument]:
        if self._kept is not None:
            documents, kept = self._kept
            for row in range(len(documents) - kept, len(documents)):
                yield documents.get(row)


def read_withdrawn(folder: Path) -> list[str]:
    path = folder / WITHDRAWN_FILE
    ids: list[str] = orjson.loads(path.read_bytes()) if path.exists() else []
    return ids


def _base(collection: Collection) -> tuple[Path, Manifest, Documents] | None:
    """The version to go on from: the served one, else the newest that is sound.

    Any would do: the log is kept from the oldest version's position on.
    """
    versions = sorted(collection.versions(), key=lambda version: (version == collection.current(), version))
    for version in reversed(versions):
        folder = collection.folder(version)
        try:
            manifest = Manifest.read(folder)
            for name in (*(DOCUMENTS_FILES if manifest.fresh.posted else ()), WITHDRAWN_FILE):
                if name in manifest.files:
                    verify_file(folder, manifest, name, checksum=True)
            return folder, manifest, Documents.open(folder, manifest.counts.documents)
        except BadSnapshot:
            continue
    return None

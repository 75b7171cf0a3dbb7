"""What changed between two versions: which documents, and which answers.

Documents are matched by the 64-bit hashes of their ids and compared by their digests, so no text is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexer.encode import Encoder
from indexer.probe import top_documents
from indexer.publish import served_manifest
from indexer.store.collection import Collection
from indexer.store.documents import COMPARED_FILES, Documents
from indexer.store.errors import BadSnapshot
from indexer.store.manifest import Manifest, verify_file
from indexer.store.snapshot import Snapshot

BLOCK = 1 << 18

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Changes:
    """How many documents are new, differ in anything (metadata too), or are gone.

    Of those that are gone, `withdrawn` were deleted by the service; `before` is how many there were.
    """

    added: int
    changed: int
    removed: int
    withdrawn: int = field(default=0, compare=False)
    before: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentDiff:
    """Document rows, ascending: `added` and `changed` of the new version, `removed` of the old one."""

    added: Rows
    changed: Rows
    removed: Rows


@dataclass(frozen=True, slots=True)
class ChangedAnswer:
    """A query whose ten best documents are others, or in another order: ids that came and went."""

    query: str
    came: list[str]
    went: list[str]


def compare_documents(old: Documents, new: Documents) -> DocumentDiff:
    added, changed, removed = [], [], []
    for new_rows, old_rows in _matches(new, old):
        added.append(new_rows[old_rows < 0])
        new_rows, old_rows = new_rows[old_rows >= 0], old_rows[old_rows >= 0]
        changed.append(new_rows[(new.digests(new_rows) != old.digests(old_rows)).any(axis=1)])
    for old_rows, new_rows in _matches(old, new):
        removed.append(old_rows[new_rows < 0])
    return DocumentDiff(*(np.sort(np.concatenate(rows)) for rows in (added, changed, removed)))


def changes_since_published(collection: Collection, new: Documents, deleted: Iterable[str] = ()) -> Changes:
    """Against the version that is served; if none is, or none that can be read, every document is new.

    `deleted` are ids that the service was told to withdraw.
    """
    served = served_manifest(collection)
    try:
        old = _open_sound(collection.folder(served.version), served) if served else None
    except BadSnapshot:
        old = None
    if old is None:
        return Changes(len(new), 0, 0)
    diff = compare_documents(old, new)
    withdrawn = sum(old.row_of(each) is not None and new.row_of(each) is None for each in deleted)
    return Changes(len(diff.added), len(diff.changed), len(diff.removed), withdrawn, len(old))


def _open_sound(folder: Path, manifest: Manifest) -> Documents:
    """The documents, once what they are compared by is what was written."""
    for name in COMPARED_FILES:
        if name in manifest.files:  # format 1 has no digests
            verify_file(folder, manifest, name, checksum=True)
    return Documents.open(folder, manifest.counts.documents)


def compare_answers(old: Snapshot, new: Snapshot, encoder: Encoder, queries: Sequence[str]) -> list[ChangedAnswer]:
    """The queries whose ten best documents differ."""
    changed = []
    answers = zip(queries, top_documents(old, encoder, queries), top_documents(new, encoder, queries), strict=True)
    for query, before, after in answers:
        if before != after:
            came, went = [one for one in after if one not in before], [one for one in before if one not in after]
            changed.append(ChangedAnswer(query, came, went))
    return changed


def _matches(ours: Documents, theirs: Documents) -> Iterator[tuple[Rows, Rows]]:
    """Every document row of `ours`, in blocks, and the row of the same id in `theirs`, −1 where it has none."""
    for start in range(0, len(ours), BLOCK):
        hashes = ours.id_hashes[start : start + BLOCK]
        places = np.minimum(np.searchsorted(theirs.id_hashes, hashes), len(theirs) - 1)
        rows = np.where(theirs.id_hashes[places] == hashes, theirs.id_rows[places], -1)
        yield ours.id_rows[start : start + BLOCK].astype(np.int64), rows.astype(np.int64)

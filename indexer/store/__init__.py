"""The snapshot on disk and the collection of its versions: reader and writer. No torch.

The service needs no more of the indexer than this package; the file format is in docs/index-format.md.
"""

from indexer.errors import BadCollection, BadFilter, BadLog, BadSnapshot, DatabaseAway, NotWritten
from indexer.store.collection import Collection, new_version
from indexer.store.documents import StoredDocument
from indexer.store.filters import AnyOf, Either, Equal, Filter, Not, Range
from indexer.store.fresh_log import Change, Cursor, Deleted, Frame, FreshLog, Posted
from indexer.store.kinds import IndexKind
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from indexer.store.writer import SnapshotWriter

__all__ = [
    "AnyOf",
    "BadCollection",
    "BadFilter",
    "BadLog",
    "BadSnapshot",
    "Change",
    "Collection",
    "Cursor",
    "DatabaseAway",
    "Deleted",
    "Either",
    "Equal",
    "Filter",
    "Frame",
    "FreshLog",
    "IndexKind",
    "Manifest",
    "Not",
    "NotWritten",
    "Posted",
    "Range",
    "Snapshot",
    "SnapshotWriter",
    "StoredDocument",
    "new_version",
]

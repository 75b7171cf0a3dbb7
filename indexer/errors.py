"""Exceptions of the indexer and its store."""

from __future__ import annotations

import errno
from pathlib import Path

from models.errors import CareError


class BadCorpus(CareError):
    """A corpus that cannot be read, is empty, or has bad rows without --skip-bad."""


class BadBuild(CareError):
    """Build options that contradict each other or the encoder, or embeddings that are not unit vectors."""


class BadCluster(CareError):
    """A Ray cluster that cannot be reached, or a node of it that cannot encode."""


class Blocked(CareError):
    """A version that was built but may not be published."""


class BadSnapshot(CareError):
    """A snapshot folder that is incomplete, altered, or written by a newer program."""


class BadCollection(CareError):
    """A version that a collection does not have, or may not publish."""


class BadBackup(CareError):
    """A backup that cannot be written or read, or a folder that cannot take one."""


class Busy(CareError):
    """Another process works on the collection; the same command succeeds when it has ended."""

    exit_code = 75  # sysexits' EX_TEMPFAIL: try again later


class BadDisk(CareError):
    """A disk on which a lock does not keep other machines out."""

    def __init__(self, folder: Path, reason: object) -> None:
        super().__init__(
            f"{folder} lies on a disk without locks between machines ({reason}): two could write at once; "
            "mount it with locks (NFS 4 without nolock and local_lock), or keep the collection on another disk"
        )


class TooLarge(CareError):
    """More rows or larger numbers than the snapshot format holds."""


class BadIndex(CareError):
    """A kind of index that does not go with the vectors."""


class NotWritten(CareError):
    """A file could not be written, as a rule because the disk is full."""

    def __init__(self, path: Path, reason: object) -> None:
        is_closed = getattr(reason, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS)
        step = "let this user write there" if is_closed else "free some space"
        super().__init__(f"{path} could not be written ({reason}); {step}, then run the same command again")


class NotReached(CareError):
    """A place of shards that cannot be opened, read or written."""

    def __init__(self, url: str, reason: object) -> None:
        super().__init__(f"{url} cannot be used ({reason}); give --shards a place that can be read and written")


class BadLog(CareError):
    """A log of fresh documents that is damaged before its end, or lacks frames that are still needed."""


class BadDatabase(CareError):
    """A vector database that is named wrongly, or cannot be used from here."""


class DatabaseAway(CareError):
    """The vector database does not answer, or not as it should; the same call may succeed later."""

    exit_code = 75


class BadFilter(CareError):
    """A filter that the collection cannot answer; `field` is the metadata field that it names."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class BadQueries(CareError):
    """A file of queries or canaries that cannot be read as one."""


class BadValue(CareError):
    """A metadata value that no filter column can hold."""

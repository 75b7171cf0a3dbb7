"""What can go wrong with a snapshot, a collection or a filter."""

from __future__ import annotations

from models.errors import CareError


class BadSnapshot(CareError):
    """A snapshot folder that is incomplete, altered, or written by a newer program."""


class BadCollection(CareError):
    """A version that a collection does not have, or may not publish."""


class BadFilter(CareError):
    """A filter that the collection cannot answer; `field` is the metadata field that it names."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

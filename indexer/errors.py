"""What can go wrong between a corpus and a snapshot."""

from __future__ import annotations

from models.errors import CareError


class BadCorpus(CareError):
    """A corpus that cannot be read, is empty, or has rows that nobody asked to skip."""


class BadBuild(CareError):
    """Build options that contradict each other or the encoder, or embeddings that are not unit vectors."""


class BadCluster(CareError):
    """A Ray cluster that cannot be reached, or a node of it that cannot encode."""


class Blocked(CareError):
    """A version that was built but may not be published."""

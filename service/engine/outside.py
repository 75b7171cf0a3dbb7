"""Vectors that are searched in a vector database: the engine's side of it. Loads the database's client.

A database that keeps failing is not asked for a while: whoever waits learns at once that it is away, instead of after a
time-out each. Knows nothing of queues or of what a query says.
"""

from __future__ import annotations

from contextlib import suppress

from indexer.errors import DatabaseAway
from indexer.store.collection import Database
from indexer.store.qdrant import Qdrant, QdrantVectors
from indexer.store.snapshot import Snapshot
from service.breaker import Breaker
from service.engine.device import OpenVectors, Rows, Vectors
from service.serving import Selection

RETRY_SECONDS = 1.0
AWAY = "the vector database does not answer; try again when it is back"


class OutsideVectors:
    """One snapshot's vectors in a database, found there by the first search that gets through."""

    def __init__(self, database: Qdrant, snapshot: Snapshot, breaker: Breaker) -> None:
        self._database = database
        self._snapshot = snapshot
        self._breaker = breaker
        self._vectors: QdrantVectors | None = None

    def open(self) -> QdrantVectors:
        """Raises BadCollection where the snapshot is not in the database, and DatabaseAway."""
        if self._vectors is None:
            self._vectors = self._database.open(self._snapshot)
        return self._vectors

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        """See VectorSearch; raises what `open` raises."""
        if not self._breaker.allows():
            raise DatabaseAway(AWAY)
        try:
            found = self.open().search(queries, k, () if selection is None else selection.filters)
        except DatabaseAway as error:
            self._breaker.failed(str(error))
            raise
        self._breaker.succeeded()
        return found


def open_outside(database: Database) -> OpenVectors:
    """Opens snapshots in the database, by one client for all of them."""
    connected = database.connect()
    breaker = Breaker(f"searching in {database.url}", RETRY_SECONDS)

    def open_vectors(snapshot: Snapshot) -> OutsideVectors:
        vectors = OutsideVectors(connected, snapshot, breaker)
        with suppress(DatabaseAway):  # it will be back, and then nobody should have to open the snapshot again
            vectors.open()
        return vectors

    return open_vectors

"""Published versions in a Qdrant server: a collection for each, and an alias for the one that is served.

A point is a passage: its id is the passage row. Whoever serves a version searches that version's own collection, so
that no answer mixes two while the alias moves; the alias is for everybody else. Qdrant chooses candidates, by products
with the query rounded to fp16; the scores are exact, from the snapshot's vectors, as they are for every index here.
`indexer.upload` writes what is read here. Knows nothing of queries' texts or of HTTP servers of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from indexer.store.errors import BadCollection, DatabaseAway
from indexer.store.filters import Filter
from indexer.store.kinds import IndexKind
from indexer.store.qdrant_filters import conditions
from indexer.store.snapshot import Snapshot
from indexer.store.vectors import Rows, Scores

# What a collection says of itself: whose vectors it holds, how they are indexed, and how far to search. The last is
# written when everything was checked: a collection without it is unfinished.
CONTENT, INDEX, DEPTH = "content", "index", "search_depth"
# Candidates beyond those asked for: where the rounded query mistakes the order of near ones, the right ones are there.
SPARE_ROWS = 16

P = ParamSpec("P")
T = TypeVar("T")


class Qdrant:
    """The collections behind one alias of a server. Threads may share it."""

    def __init__(self, client: QdrantClient, alias: str) -> None:
        self.client = client
        self._alias = alias

    @classmethod
    def connect(cls, url: str, alias: str, key: str | None, timeout_seconds: int) -> Qdrant:
        """Asks nothing yet."""
        headers = {"api-key": key} if key else {}
        # Not by its `api_key`, which warns of plain HTTP: inside a cluster's network that is the usual way.
        client = QdrantClient(url=url, headers=headers, timeout=timeout_seconds, check_compatibility=False)
        return cls(client, alias)

    def close(self) -> None:
        self.client.close()

    def name(self, version: str) -> str:
        """The collection of a version."""
        return f"{self._alias}-{version}"

    @staticmethod
    def call(ask: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What the server answers to a method of the client; raises DatabaseAway where it does not, or refuses."""
        try:
            return ask(*arguments, **named)
        except UnexpectedResponse as error:
            if error.status_code in (401, 403):
                raise DatabaseAway(
                    "the vector database refuses the key; set CARE_VECTORS_KEY to one it takes"
                ) from error
            raise DatabaseAway(f"the vector database answers {error.status_code}; its log says why") from error
        except (ResponseHandlingException, ResourceExhaustedResponse) as error:
            reason = type(getattr(error, "source", error)).__name__
            raise DatabaseAway(f"the vector database does not answer ({reason}); try again when it is back") from error

    def marks(self, version: str) -> dict[str, Any] | None:
        """What the collection of a version says of itself; None where there is no such collection."""
        if not self.call(self.client.collection_exists, self.name(version)):
            return None
        return self.call(self.client.get_collection, self.name(version)).config.metadata or {}

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether all of the snapshot was put there and checked."""
        return is_finished(self.marks(snapshot.version), snapshot)

    def open(self, snapshot: Snapshot) -> QdrantVectors:
        """The snapshot's vectors there; raises BadCollection where they are not, or not wholly."""
        version = snapshot.version
        marks = self.marks(version)
        if marks is None or not is_finished(marks, snapshot):
            raise BadCollection(f"{version} is not in the vector database; care index publish {version} puts it there")
        return QdrantVectors(self, snapshot, IndexKind(marks[INDEX]), int(marks[DEPTH]))

    def point_to(self, snapshot: Snapshot) -> None:
        """Moves the alias to a snapshot that is there, in one step; raises BadCollection where it is not."""
        self.open(snapshot)
        moves: list[models.DeleteAliasOperation | models.CreateAliasOperation] = [
            models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=self._alias)),
            models.CreateAliasOperation(
                create_alias=models.CreateAlias(collection_name=self.name(snapshot.version), alias_name=self._alias)
            ),
        ]
        self.call(self.client.update_collection_aliases, moves)

    def drop(self, version: str) -> None:
        """Removes the collection of a version, where there is one."""
        self.call(self.client.delete_collection, self.name(version))


class QdrantVectors:
    """A snapshot's vectors, searched in the server. `values` and an exact search of them are the snapshot's own."""

    def __init__(self, database: Qdrant, snapshot: Snapshot, kind: IndexKind, depth: int) -> None:
        """`kind`: flat has no graph and is searched exactly; else `depth` nodes of Qdrant's graph are visited."""
        self.kind = kind
        self.values = snapshot.vectors.values
        self.search_exactly = snapshot.vectors.search_exactly
        self._database = database
        self._name = database.name(snapshot.version)
        self._metadata = snapshot.metadata
        self._depth = depth

    def search(
        self, queries: Scores, k: int, filters: Sequence[Filter] = (), *, depth: int | None = None
    ) -> tuple[Scores, Rows]:
        """The best `k` passages of each query: scores and rows, both (queries, k), best first.

        Where there are fewer, the row is −1 and the score −inf. Raises DatabaseAway, BadFilter.
        """
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        must = conditions(self._metadata, filters)
        if must is None:
            return scores, rows
        limit = min(len(self.values), k + SPARE_ROWS)
        requests = self._requests(queries, limit, must, self._depth if depth is None else depth)
        answers = self._database.call(self._database.client.query_batch_points, self._name, requests)
        for place, (query, answer) in enumerate(zip(queries, answers, strict=True)):
            found = np.sort(np.array([point.id for point in answer.points], np.int64))
            products = self.values[found].astype(np.float32) @ query
            best = np.argsort(-products, kind="stable")[:k]
            scores[place, : len(best)], rows[place, : len(best)] = products[best], found[best]
        return scores, rows

    def _requests(
        self, queries: Scores, limit: int, must: list[models.Condition], depth: int
    ) -> list[models.QueryRequest]:
        if self.kind is IndexKind.FLAT:
            parameters = models.SearchParams(exact=True)
        else:
            parameters = models.SearchParams(hnsw_ef=max(depth, limit))
        only = models.Filter(must=must) if must else None
        return [
            models.QueryRequest(query=query, limit=limit, filter=only, params=parameters) for query in queries.tolist()
        ]


def is_finished(marks: dict[str, Any] | None, snapshot: Snapshot) -> bool:
    """Whether a collection that says this of itself holds all of the snapshot."""
    return marks is not None and marks.get(CONTENT) == snapshot.manifest.content and marks.get(DEPTH) is not None

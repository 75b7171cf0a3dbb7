"""Published versions in a Qdrant server: a collection for each, and an alias for the one that is served.

A point is a passage: its id is the passage row. Whoever serves a version searches that version's own collection, so
that no answer mixes two while the alias moves; the alias is for everybody else. Qdrant chooses candidates, by products
with the query rounded to fp16; the scores are exact, from the snapshot's vectors, as they are for every index here.
`indexer.upload` writes what is read here. Knows nothing of queries' texts or of HTTP servers of our own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import orjson
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from indexer.errors import BadCollection, DatabaseAway
from indexer.store.arrays import Rows, Scores
from indexer.store.filters import AnyOf, Either, Filter, Not, SplitNumber
from indexer.store.kinds import IndexKind
from indexer.store.metadata import Column, Interval, MetadataIndex, NumberColumn
from indexer.store.snapshot import Snapshot

CODES = "codes"
RESTS = "_rest"
FLOAT_MAX = sys.float_info.max


def payload_indexes(metadata: MetadataIndex) -> dict[str, models.PayloadSchemaType]:
    """The payload's fields that filters look at, and what they hold."""
    schema = models.PayloadSchemaType
    columns = list(enumerate(metadata.columns))
    kinds = {_key(n): schema.FLOAT if isinstance(column, NumberColumn) else schema.INTEGER for n, column in columns}
    return kinds | {f"{_key(n)}{RESTS}": schema.INTEGER for n, column in columns if _has_rests(column)}


def payload(snapshot: Snapshot, passage: int) -> dict[str, Any]:
    """What is stored beside the vector of a passage row."""
    document = int(snapshot.passages.documents[passage])
    shown: dict[str, Any] = orjson.loads(b"{%b}" % snapshot.documents.get(document).json)
    codes: dict[str, float | list[int]] = {}
    for position, column in enumerate(snapshot.metadata.columns):
        stored = column.stored(document)
        if isinstance(stored, list) and stored:
            codes[_name(position)] = stored
        elif isinstance(stored, tuple):
            codes[_name(position)] = stored[0]
            if _has_rests(column):
                codes[f"{_name(position)}{RESTS}"] = stored[1]
    return shown | {CODES: codes}


def conditions(metadata: MetadataIndex, filters: Sequence[Filter]) -> list[models.Condition] | None:
    """Conditions that all must hold, none for no filters; None where no point can satisfy them. Raises BadFilter."""
    written = [_write(metadata, each) for each in filters]
    if any(each is False for each in written):
        return None
    return [each for each in written if not isinstance(each, bool)]


def _write(metadata: MetadataIndex, given: Filter) -> models.Condition | bool:
    """The filter as a condition; True if every point satisfies it, False if none can."""
    if isinstance(given, Not):
        excluded = _write(metadata, given.excluded)
        return not excluded if isinstance(excluded, bool) else models.Filter(must_not=[excluded])
    if isinstance(given, Either):
        written = [_write(metadata, each) for each in given.alternatives]
        possible = [each for each in written if not isinstance(each, bool)]
        return True if any(each is True for each in written) else bool(possible) and models.Filter(should=possible)
    if isinstance(given, AnyOf) and not given.values:
        return False
    column = metadata.column(given)
    intervals = column.intervals(given)
    return bool(intervals) and _condition(_key(metadata.position(given.field)), column, intervals)


def _condition(key: str, column: Column, intervals: list[Interval]) -> models.Condition:
    """The field's number, or one of its codes, lies in one of the intervals."""
    if isinstance(column, NumberColumn):
        return _any([_all(_inside(key, *bounds, rests=column.has_rests)) for bounds in intervals])
    if all(low == high for low, high in intervals):
        return models.FieldCondition(key=key, match=models.MatchAny(any=[int(low) for (low, _), _ in intervals]))
    return _any([_range(key, gte=low, lte=high) for (low, _), (high, _) in intervals])


def _inside(key: str, low: SplitNumber, high: SplitNumber, *, rests: bool) -> list[models.Condition]:
    """Conditions that the number of a field lies between two, both included; JSON has no infinity, and needs none."""
    found: list[models.Condition] = []
    for (value, rest), beyond, or_equal in ((low, "gt", "gte"), (high, "lt", "lte")):
        if value in (float("inf"), float("-inf")):
            continue
        equal_is_inside = rest <= 0 if beyond == "gt" else rest >= 0
        if not rests:
            found.append(_range(key, **{or_equal if equal_is_inside else beyond: value}))
            continue
        at_value = _all([_range(key, gte=value, lte=value), _range(f"{key}{RESTS}", **{or_equal: rest})])
        found.append(_any([_range(key, **{beyond: value}), at_value]))
    return found or [_range(key, gte=-FLOAT_MAX)]


def _range(key: str, **bounds: float) -> models.Condition:
    return models.FieldCondition(key=key, range=models.Range(**bounds))


def _all(conditions: list[models.Condition]) -> models.Condition:
    return conditions[0] if len(conditions) == 1 else models.Filter(must=conditions)


def _any(conditions: Sequence[models.Condition]) -> models.Condition:
    return conditions[0] if len(conditions) == 1 else models.Filter(should=list(conditions))


def _has_rests(column: Column) -> bool:
    return isinstance(column, NumberColumn) and column.has_rests


def _name(position: int) -> str:
    # By position: a field's name may hold anything, a path in a payload may not.
    return f"f{position}"


def _key(position: int) -> str:
    return f"{CODES}.{_name(position)}"


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

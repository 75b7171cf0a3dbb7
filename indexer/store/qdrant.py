"""Searches published versions in a Qdrant server: a Qdrant collection for each, and an alias for the served one.

A point is a passage; its id is the passage row. A service searches its version's own collection, so no answer mixes two
versions while the alias moves. Qdrant chooses candidates; the snapshot's vectors give exact scores. Filters use `codes`
in a point's payload, what the snapshot's columns store: Qdrant has no range of texts, no equality of fractions and no
exact range of 64-bit integers, but intervals of codes and split numbers express them.
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
from indexer.store.columns import Column, Interval, NumberColumn
from indexer.store.filters import AnyOf, Either, Filter, Not, SplitNumber
from indexer.store.kinds import IndexKind
from indexer.store.metadata import MetadataIndex
from indexer.store.snapshot import Snapshot

# Metadata of a Qdrant collection: the content and index kind of its snapshot, and the search depth. The last is written
# after all checks: a collection without it is unfinished.
CONTENT, INDEX, DEPTH = "content", "index", "search_depth"
# Candidates beyond k: Qdrant ranks by the query rounded to fp16, which may swap near ones.
SPARE_ROWS = 16
CODES, RESTS = "codes", "_rest"
FLOAT_MAX = sys.float_info.max

P = ParamSpec("P")
T = TypeVar("T")


class Qdrant:
    """The collections behind one alias of a server. Threads may share it."""

    def __init__(self, client: QdrantClient, alias: str) -> None:
        self.client = client
        self._alias = alias

    @classmethod
    def connect(cls, url: str, alias: str, key: str | None, timeout_seconds: int) -> Qdrant:
        """Makes a client; sends nothing yet."""
        # Not by `api_key`, which warns of plain HTTP, the usual way inside a cluster's network.
        headers = {"api-key": key} if key else {}
        return cls(QdrantClient(url=url, headers=headers, timeout=timeout_seconds, check_compatibility=False), alias)

    def close(self) -> None:
        self.client.close()

    def name(self, version: str) -> str:
        """Returns the collection of a version."""
        return f"{self._alias}-{version}"

    @staticmethod
    def call(ask: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a method of the client; raises DatabaseAway if the server does not answer, or refuses."""
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
        """Returns the metadata of a version's collection; None if there is no such collection."""
        if not self.call(self.client.collection_exists, self.name(version)):
            return None
        return self.call(self.client.get_collection, self.name(version)).config.metadata or {}

    def holds(self, snapshot: Snapshot) -> bool:
        """Returns whether all of the snapshot was uploaded and checked."""
        return self._finished(snapshot) is not None

    def _finished(self, snapshot: Snapshot) -> dict[str, Any] | None:
        marks = self.marks(snapshot.version) or {}
        return marks if marks.get(CONTENT) == snapshot.manifest.content and marks.get(DEPTH) is not None else None

    def open(self, snapshot: Snapshot) -> QdrantVectors:
        """Opens the snapshot's vectors there; raises BadCollection if they are missing or incomplete."""
        version = snapshot.version
        if (marks := self._finished(snapshot)) is None:
            raise BadCollection(f"{version} is not in the vector database; care index publish {version} puts it there")
        return QdrantVectors(self, snapshot, IndexKind(marks[INDEX]), int(marks[DEPTH]))

    def point_to(self, snapshot: Snapshot) -> None:
        """Moves the alias to an uploaded snapshot in one step; raises BadCollection if it is not there."""
        self.open(snapshot)
        moves: list[models.DeleteAliasOperation | models.CreateAliasOperation] = [
            models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=self._alias)),
            models.CreateAliasOperation(
                create_alias=models.CreateAlias(collection_name=self.name(snapshot.version), alias_name=self._alias)
            ),
        ]
        self.call(self.client.update_collection_aliases, moves)

    def drop(self, version: str) -> None:
        """Removes the collection of a version, if there is one."""
        self.call(self.client.delete_collection, self.name(version))


class QdrantVectors:
    """A snapshot's vectors, searched in the server; exact searches use the snapshot's own."""

    def __init__(self, database: Qdrant, snapshot: Snapshot, kind: IndexKind, depth: int) -> None:
        """`kind` flat is searched exactly; otherwise `depth` nodes of Qdrant's graph are visited."""
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
        """See VectorIndex.search; filters instead of a mask. Raises DatabaseAway, BadFilter."""
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        must = conditions(self._metadata, filters)
        if must is None:
            return scores, rows
        limit = min(len(self.values), k + SPARE_ROWS)
        if self.kind is IndexKind.FLAT:
            parameters = models.SearchParams(exact=True)
        else:
            parameters = models.SearchParams(hnsw_ef=max(self._depth if depth is None else depth, limit))
        only = models.Filter(must=must) if must else None
        requests = [
            models.QueryRequest(query=query, limit=limit, filter=only, params=parameters) for query in queries.tolist()
        ]
        answers = self._database.call(self._database.client.query_batch_points, self._name, requests)
        for place, (query, answer) in enumerate(zip(queries, answers, strict=True)):
            found = np.sort(np.array([point.id for point in answer.points], np.int64))
            products = self.values[found].astype(np.float32) @ query
            best = np.argsort(-products, kind="stable")[:k]
            scores[place, : len(best)], rows[place, : len(best)] = products[best], found[best]
        return scores, rows


def payload_indexes(metadata: MetadataIndex) -> dict[str, models.PayloadSchemaType]:
    """Returns the payload fields that filters use, and their types."""
    schema = models.PayloadSchemaType
    columns = list(enumerate(metadata.columns))
    kinds = {_key(n): schema.FLOAT if isinstance(column, NumberColumn) else schema.INTEGER for n, column in columns}
    return kinds | {f"{_key(n)}{RESTS}": schema.INTEGER for n, column in columns if column.has_rests}


def payload(snapshot: Snapshot, passage: int) -> dict[str, Any]:
    """Returns the payload of a passage row."""
    document = int(snapshot.passages.documents[passage])
    shown: dict[str, Any] = orjson.loads(b"{%b}" % snapshot.documents.get(document).json)
    codes: dict[str, float | list[int]] = {}
    for position, column in enumerate(snapshot.metadata.columns):
        stored = column.stored(document)
        if isinstance(stored, list) and stored:
            codes[f"f{position}"] = stored
        elif isinstance(stored, tuple):
            codes[f"f{position}"] = stored[0]
            if column.has_rests:
                codes[f"f{position}{RESTS}"] = stored[1]
    return shown | {CODES: codes}


def conditions(metadata: MetadataIndex, filters: Sequence[Filter]) -> list[models.Condition] | None:
    """Conditions that all must hold, none for no filters; None if no point can satisfy them. Raises BadFilter."""
    written = [_write(metadata, each) for each in filters]
    if any(each is False for each in written):
        return None
    return [each for each in written if not isinstance(each, bool)]


def _write(metadata: MetadataIndex, clause: Filter) -> models.Condition | bool:
    """Returns the filter as a condition; True if every point satisfies it, False if none can."""
    if isinstance(clause, Not):
        excluded = _write(metadata, clause.excluded)
        return not excluded if isinstance(excluded, bool) else models.Filter(must_not=[excluded])
    if isinstance(clause, Either):
        written = [_write(metadata, each) for each in clause.alternatives]
        possible = [each for each in written if not isinstance(each, bool)]
        return True if any(each is True for each in written) else bool(possible) and models.Filter(should=possible)
    if isinstance(clause, AnyOf) and not clause.values:
        return False
    column = metadata.column(clause)
    intervals = column.intervals(clause)
    return bool(intervals) and _condition(_key(metadata.fields.index(clause.field)), column, intervals)


def _condition(key: str, column: Column, intervals: list[Interval]) -> models.Condition:
    """Returns the condition that the field's number, or one of its codes, is in one of the intervals."""
    if isinstance(column, NumberColumn):
        return _any([_all(_inside(key, *bounds, rests=column.has_rests)) for bounds in intervals])
    if all(low == high for low, high in intervals):
        return models.FieldCondition(key=key, match=models.MatchAny(any=[int(low) for (low, _), _ in intervals]))
    return _any([_range(key, gte=low, lte=high) for (low, _), (high, _) in intervals])


def _inside(key: str, low: SplitNumber, high: SplitNumber, *, rests: bool) -> list[models.Condition]:
    """Conditions that a field's number lies between two, both included; an infinite bound needs none."""
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


def _any(conditions: list[models.Condition]) -> models.Condition:
    return conditions[0] if len(conditions) == 1 else models.Filter(should=conditions)


def _key(position: int) -> str:
    # By position: a field's name may hold anything, a path in a payload may not.
    return f"{CODES}.f{position}"

"""Checks that a Qdrant server does what the project needs; test_qdrant.py runs this.

Two small random snapshots are published into collections with a name of their own. Every answer is compared with the
snapshot's own exact search. At the end the server is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexer.store.collection import Collection, Database
from indexer.store.filters import AnyOf, Either, Equal, Filter, Not, Range
from indexer.store.qdrant import Qdrant, QdrantVectors
from indexer.store.snapshot import Snapshot
from indexer.upload import REQUEST_ROWS, upload
from tests.unit.indexer.support import Entry, unit_vectors, write_snapshot

DIM = 64
DOCUMENTS = 300
QUERIES = 10
FILTERED_QUERIES = 3
FLOOR = 0.95
# A national id number: float64 cannot tell it from its neighbours.
FIRST_PID = 110101199001011234
MORNING = datetime(2026, 1, 1, tzinfo=UTC)

Vectors = NDArray[np.float32]


def entries(count: int) -> list[Entry]:
    """Makes documents whose metadata have every shape of a column, including gaps; some have two passages."""
    made = []
    for row in range(count):
        metadata = {
            "kind": ("drug", "disease", "检查")[row % 3],
            "tags": [("心脏", "血液", "a b")[part % 3] for part in range(row % 3)],
            "updated": f"2025-{row % 12 + 1:02d}-{row % 28 + 1:02d}",
            "dose": row / 7,
            "pid": FIRST_PID + row if row % 6 else row / 7,
            "otc": row % 2 == 0,
        }
        kept = {name: value for place, (name, value) in enumerate(metadata.items()) if (row + place) % 5}
        made.append(Entry(f"d{row}", "一二三四", f"title {row}", kept, [(0, 2), (2, 4)] if row % 4 == 0 else None))
    return made


FILTERS: list[tuple[Filter, ...]] = [
    (),
    (Equal("kind", "drug"),),
    (Equal("kind", "nothing has it"),),
    (AnyOf("kind", ("drug", "检查")),),
    (Equal("tags", "血液"),),
    (AnyOf("tags", ("a b", "心脏")), Equal("otc", True)),
    (Range("updated", gte="2025-03", lt="2025-07"),),
    (Range("updated", gt="2025-11-30"), Equal("kind", "disease")),
    (Range("updated", gt="2026"),),
    (Equal("dose", 3 / 7),),
    (AnyOf("dose", (3 / 7, 8 / 7, 1000.0)),),
    (Range("dose", gt=3 / 7, lte=60.0),),
    (Range("dose", gte=float("-inf"), lt=float("inf")),),
    (Range("dose", gte="1e309"),),
    (Not(Equal("kind", "drug")),),
    (Not(Equal("tags", "血液")), Not(Range("dose", gt=3 / 7))),
    (Not(Equal("kind", "nothing has it")),),
    (Either((Equal("kind", "drug"), Range("dose", lt=3.0))),),
    (Either((Equal("kind", "nothing has it"), Not(Equal("kind", "nor it")))),),
    (Either((Equal("kind", "nothing has it"), Equal("kind", "nor it"))),),
    (Not(Either((Equal("otc", True), Not(Equal("kind", "检查"))))),),
    (Equal("pid", FIRST_PID + 1),),
    (AnyOf("pid", (FIRST_PID + 2, FIRST_PID + 3, str(FIRST_PID + 4), 6 / 7)),),
    (Range("pid", gt=FIRST_PID + 1, lt=FIRST_PID + 8),),
    (Range("pid", gte=FIRST_PID + 20),),
]


def add_version(collection: Collection, day: int, count: int = DOCUMENTS) -> str:
    """Adds a finished version with the date of that day."""
    version = f"{MORNING + timedelta(days=day):%Y%m%dT%H%M%S}000Z-{day:08x}"
    with collection.building(version) as folder:
        write_snapshot(folder, entries(count), version=version, dim=DIM)
    return version


def queries() -> Vectors:
    return unit_vectors(QUERIES, DIM, seed=1).astype(np.float32)


def require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_answers(vectors: QdrantVectors, snapshot: Snapshot) -> None:
    """Checks that every filter admits the same rows as locally, and that their scores are exact."""
    for filters in FILTERS:
        mask = snapshot.metadata.select(filters)[snapshot.passages.documents]
        for k in (10, len(mask)):
            scores, rows = vectors.search(queries()[:FILTERED_QUERIES], k, filters)
            expected, _ = snapshot.vectors.search(queries()[:FILTERED_QUERIES], k, mask)
            found = rows >= 0
            require(mask[rows[found]].all(), f"{filters}: a row that the filter forbids")
            require((found.sum(axis=1) == min(k, mask.sum())).all(), f"{filters}: not {k} rows")
            np.testing.assert_allclose(scores, expected, atol=1e-5, err_msg=str(filters))


def check_upload(database: Qdrant, snapshot: Snapshot, *, flat_passages: int, least: float) -> QdrantVectors:
    upload(database, snapshot, queries, FLOOR, flat_passages=flat_passages)
    vectors = database.open(snapshot)
    exact, _ = snapshot.vectors.search_exactly(queries(), 10)
    found, _ = vectors.search(queries(), 10)
    require((found >= exact[:, -1:] - 1e-5).mean() >= least, "too little of the exact answer is found")
    return vectors


def conform(database: Database, root: Path) -> Iterator[str]:
    """Yields each property that holds; raises an error if one does not."""
    collection = Collection(root, database)
    (root / "versions").mkdir(parents=True)
    old, new = (Snapshot.open(collection.folder(add_version(collection, day))) for day in (1, 2))
    with closing(database.connect()) as connected:
        try:
            vectors = check_upload(connected, old, flat_passages=DOCUMENTS * 2, least=1.0)
            check_answers(vectors, old)
            yield f"exact search answers {len(FILTERS)} kinds of filters as here"
            collection.publish(old.version)
            check_upload(connected, new, flat_passages=0, least=FLOOR)
            yield "the graph reaches the floor of recall"
            collection.publish(new.version)
            collection.rollback()
            require(_alias(connected, database) == connected.name(old.version), "the alias did not move")
            yield "the alias moves forth and back"
            _interrupt(connected, new)
            check_upload(connected, new, flat_passages=0, least=FLOOR)
            yield "an upload that was interrupted is finished"
            collection.publish(new.version)
            third = add_version(collection, 3, 10)
            upload(connected, Snapshot.open(collection.folder(third)), queries, FLOOR)
            collection.publish(third)
            require(collection.prune(1, 0.0) == [old.version], "prune removed something else")
            require(connected.marks(old.version) is None, "a pruned version is still there")
            yield "a version that is pruned leaves the server too"
        finally:
            for version in (old.version, new.version, *collection.versions()):
                connected.drop(version)


def _alias(connected: Qdrant, database: Database) -> str | None:
    aliases = connected.call(connected.client.get_aliases).aliases
    return next((one.collection_name for one in aliases if one.alias_name == database.alias), None)


def _interrupt(connected: Qdrant, snapshot: Snapshot) -> None:
    """Leaves the upload as if killed after its first requests: rows and the last mark are missing."""
    from qdrant_client import models

    name = connected.name(snapshot.version)
    gone = list(range(REQUEST_ROWS + 10, len(snapshot.passages)))
    connected.call(connected.client.delete, name, models.PointIdsList(points=gone))
    connected.call(connected.client.update_collection, name, metadata={"search_depth": None, "recall": None})

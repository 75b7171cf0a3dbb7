"""Uploads a snapshot into a vector database, waits for its index, counts it and measures its recall.

A collection is marked finished as the last step. A killed upload resumes where it stopped, because rows go in order and
each request is waited for. Moving the alias is part of publishing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from qdrant_client import models

from indexer.checks import choose_depth
from indexer.errors import BadBuild, BadDatabase
from indexer.store.kinds import FLAT_PASSAGES, HNSW_EF_CONSTRUCTION, HNSW_LINKS, IndexKind
from indexer.store.qdrant import CONTENT, DEPTH, INDEX, Qdrant, QdrantVectors, payload, payload_indexes
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import Vectors
from models.progress import Progress

# Rows of one request: some megabytes of JSON.
REQUEST_ROWS = 256
POLL_SECONDS = 0.5
# Indexing timeout: a graph over ten million passages takes hours.
PATIENCE_SECONDS = 6 * 3600.0


def upload(
    database: Qdrant,
    snapshot: Snapshot,
    queries: Callable[[], Vectors],
    floor: float,
    *,
    flat_passages: int = FLAT_PASSAGES,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Uploads unless the snapshot is there already; its recall for `queries` must reach `floor`.

    Raises DatabaseAway, BadDatabase and BadBuild.
    """
    if database.holds(snapshot):
        return
    kind = IndexKind.FLAT if len(snapshot.passages) <= flat_passages else IndexKind.HNSW
    name = database.name(snapshot.version)
    start, values = _begin(database, snapshot, kind), snapshot.values
    with Progress("upload", "passages", len(values), first=start) as bar:
        for first in range(start, len(values), REQUEST_ROWS):
            rows = range(first, min(first + REQUEST_ROWS, len(values)))
            vectors = values[first : rows.stop].astype("<f4").tolist()
            payloads = [payload(snapshot, row) for row in rows]
            batch = models.Batch(ids=list(rows), vectors=vectors, payloads=payloads)
            database.call(database.client.upsert, name, batch, wait=True)
            bar.update(len(rows))
    _await_index(database, name, patience_seconds)
    count = database.call(database.client.count, name, exact=True).count
    if count != len(snapshot.passages):
        database.drop(snapshot.version)
        raise BadDatabase(f"{name} has {count} of {len(snapshot.passages)} passages; it is removed: publish again")
    depth, recall = choose_depth(QdrantVectors(database, snapshot, kind, 0), queries(), floor)
    finished = {DEPTH: depth, "recall": recall.model_dump()}
    database.call(database.client.update_collection, name, metadata=finished)
    if not database.holds(snapshot):
        raise BadDatabase("the vector database keeps no metadata of collections; it must be Qdrant 1.16 or newer")


def _begin(database: Qdrant, snapshot: Snapshot, kind: IndexKind) -> int:
    """Makes the collection, or finds it unfinished; returns the first row that may be missing."""
    name, own = database.name(snapshot.version), {CONTENT: snapshot.manifest.content, INDEX: kind.value}
    start = 0
    marks = database.marks(snapshot.version)
    if marks is not None and own.items() <= marks.items():
        count = database.call(database.client.count, name, exact=True).count
        start = count // REQUEST_ROWS * REQUEST_ROWS
    else:
        if marks is not None:
            database.drop(snapshot.version)
        vectors = models.VectorParams(
            size=snapshot.manifest.dim, distance=models.Distance.DOT, datatype=models.Datatype.FLOAT16
        )
        # Without links Qdrant builds no graph.
        links = 0 if kind is IndexKind.FLAT else HNSW_LINKS
        graph = models.HnswConfigDiff(m=links, ef_construct=HNSW_EF_CONSTRUCTION)
        database.call(database.client.create_collection, name, vectors, hnsw_config=graph, metadata=own)
    # Before the rows, so that Qdrant's graph uses them; again after a kill, because one may be missing.
    for key, schema in payload_indexes(snapshot.metadata).items():
        database.call(database.client.create_payload_index, name, key, schema)
    return start


def _await_index(database: Qdrant, name: str, patience_seconds: float) -> None:
    """Returns once nothing is left to index."""
    # A restarted server continues indexing only when something changes.
    database.call(database.client.update_collection, name, optimizers_config=models.OptimizersConfigDiff())
    deadline = time.monotonic() + patience_seconds
    while (status := database.call(database.client.get_collection, name).status) is not models.CollectionStatus.GREEN:
        if status is models.CollectionStatus.RED:
            raise BadDatabase(f"the vector database cannot index {name}; its log says why")
        if time.monotonic() > deadline:
            raise BadBuild(f"{name} is still being indexed after {patience_seconds:.0f} s; publish again later")
        time.sleep(POLL_SECONDS)

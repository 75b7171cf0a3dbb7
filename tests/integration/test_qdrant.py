"""Snapshots in a vector database: whatever fails on the way, no incomplete version is published."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from qdrant_client import models

from indexer.errors import BadBuild, BadCollection, BadDatabase, DatabaseAway
from indexer.store.collection import Collection, Database
from indexer.store.qdrant import Qdrant
from indexer.store.snapshot import Snapshot
from indexer.upload import REQUEST_ROWS, upload
from indexer.versions import Measure, prune, publish
from tests.support.qdrant_conformance import FLOOR, add_version, conform, queries
from tests.support.qdrant_server import QdrantServer, qdrant

MEASURE = Measure(lambda snapshot: queries(), FLOOR)
DOCUMENTS = 230  # more than one request of passages


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    with qdrant() as server:
        yield server


def database_of(server: QdrantServer, key: str | None = None) -> Database:
    database = Database.parse(server.where(), key, 30)
    assert database is not None
    return database


@pytest.fixture(scope="module")
def two_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("qdrant") / "collection"
    for day in (1, 2):
        add_version(Collection(root), day, DOCUMENTS)
    return root


@pytest.fixture
def collection(server: QdrantServer, two_versions: Path, tmp_path: Path) -> Collection:
    """Yields a collection of two versions, none published."""
    shutil.copytree(two_versions, tmp_path / "collection")
    return Collection(tmp_path / "collection", database_of(server))


@pytest.fixture
def snapshot(collection: Collection) -> Snapshot:
    return Snapshot.open(collection.folder(collection.versions()[0]))


@pytest.fixture
def connected(server: QdrantServer) -> Iterator[Qdrant]:
    with closing(database_of(server).connect()) as connected:
        yield connected


def test_the_server_passes_the_conformance_check(
    server: QdrantServer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Checks the stand-in; with `--qdrant http://host:6333` a real server, whose key, if any, is CARE_VECTORS_KEY."""
    database, url = database_of(server), pytestconfig.getoption("--qdrant")
    if url is not None:
        address = f"qdrant+{url.rstrip('/')}/care-{secrets.token_hex(4)}"
        database = Database.parse(address, os.environ.get("CARE_VECTORS_KEY")) or database
    assert len(list(conform(database, tmp_path / "collection"))) == 5
    assert server.collections() == []
    assert server.aliases() == {}


def test_few_passages_are_searched_exactly_and_many_by_a_graph(
    server: QdrantServer, collection: Collection, connected: Qdrant
) -> None:
    few, many = (Snapshot.open(collection.folder(version)) for version in collection.versions())
    upload(connected, few, queries, FLOOR)
    upload(connected, many, queries, FLOOR, flat_passages=10)
    assert server.graphs[connected.name(few.version)].m == 0
    assert server.graphs[connected.name(many.version)].m == 32
    for snapshot, wanted in ((few, {"exact": True}), (many, {"hnsw_ef": 64})):
        server.parameters.clear()
        connected.open(snapshot).search(queries(), 10)
        assert {**server.parameters[0].model_dump(exclude_unset=True)} == wanted


def test_a_point_shows_its_document(server: QdrantServer, snapshot: Snapshot, connected: Qdrant) -> None:
    upload(connected, snapshot, queries, FLOOR)
    (point,) = server.local.retrieve(connected.name(snapshot.version), [2], with_payload=True)
    assert point.payload is not None
    assert (point.payload["id"], point.payload["title"]) == ("d1", "title 1")
    assert point.payload["metadata"] == snapshot.documents.get(1).metadata


def test_an_interrupted_upload_resumes(server: QdrantServer, collection: Collection, snapshot: Snapshot) -> None:
    server.refuse = lambda method, path: 500 if path.endswith("points") and server.asked["PUT points"] else None
    with pytest.raises(DatabaseAway, match="answers 500"):
        publish(collection, snapshot.version, MEASURE)
    assert (collection.current(), server.aliases()) == (None, {})
    assert server.asked["PUT points"] == 1
    server.refuse = lambda method, path: None
    publish(collection, snapshot.version, MEASURE)
    assert server.asked["PUT points"] == -(-len(snapshot.passages) // REQUEST_ROWS)
    assert collection.current() == snapshot.version
    assert server.aliases() == {"care": f"care-{snapshot.version}"}


def test_an_uploaded_version_is_not_uploaded_again(server: QdrantServer, collection: Collection) -> None:
    first, second = collection.versions()
    for version in (first, second, first):
        publish(collection, version, MEASURE)
    asked = dict(server.asked)
    assert collection.rollback(second) == second
    assert server.asked["PUT points"] == asked["PUT points"]
    assert server.aliases() == {"care": f"care-{second}"}


def test_if_the_alias_cannot_move_the_pointer_does_not_move(server: QdrantServer, collection: Collection) -> None:
    first, second = collection.versions()
    publish(collection, first, MEASURE)
    server.refuse = lambda method, path: 500 if path.endswith("aliases") else None
    with pytest.raises(DatabaseAway):
        publish(collection, second, MEASURE)
    assert collection.current() == first
    assert server.aliases() == {"care": f"care-{first}"}


def test_a_version_that_was_not_uploaded_is_not_published(collection: Collection, snapshot: Snapshot) -> None:
    with pytest.raises(BadCollection, match=f"care index publish {snapshot.version} puts it there"):
        collection.publish(snapshot.version)
    assert collection.current() is None


def test_too_little_recall_publishes_nothing(server: QdrantServer, collection: Collection, snapshot: Snapshot) -> None:
    with pytest.raises(BadBuild, match=r"the floor is 1\.1"):
        publish(collection, snapshot.version, Measure(lambda snapshot: queries(), 1.1))
    assert (collection.current(), server.aliases()) == (None, {})
    publish(collection, snapshot.version, MEASURE)
    assert collection.current() == snapshot.version


def test_publishing_waits_for_the_index(server: QdrantServer, snapshot: Snapshot, connected: Qdrant) -> None:
    server.statuses = [models.CollectionStatus.YELLOW, models.CollectionStatus.GREY]
    upload(connected, snapshot, queries, FLOOR)
    assert server.statuses == []


def test_waiting_for_the_index_times_out(server: QdrantServer, snapshot: Snapshot, connected: Qdrant) -> None:
    server.statuses = [models.CollectionStatus.YELLOW] * 2
    with pytest.raises(BadBuild, match="publish again later"):
        upload(connected, snapshot, queries, FLOOR, patience_seconds=0)
    server.statuses = [models.CollectionStatus.RED] * 3  # also read with the collection's marks
    with pytest.raises(BadDatabase, match="cannot index"):
        upload(connected, snapshot, queries, FLOOR)
    server.statuses = []
    upload(connected, snapshot, queries, FLOOR)
    assert connected.holds(snapshot)


def test_points_that_were_not_uploaded_are_noticed(server: QdrantServer, snapshot: Snapshot, connected: Qdrant) -> None:
    def add_a_point(method: str, path: str) -> None:
        if path.endswith("count"):
            stray = models.PointStruct(id=10**6, vector=[0.0] * snapshot.manifest.dim)
            server.local.upsert(connected.name(snapshot.version), [stray])

    server.refuse = add_a_point
    with pytest.raises(BadDatabase, match="it is removed"):
        upload(connected, snapshot, queries, FLOOR)
    assert server.collections() == []


def test_an_outdated_server_is_refused(server: QdrantServer, snapshot: Snapshot, connected: Qdrant) -> None:
    server.keeps_metadata = False
    with pytest.raises(BadDatabase, match=r"1\.16 or newer"):
        upload(connected, snapshot, queries, FLOOR)


def test_a_foreign_collection_of_the_same_name_is_replaced(
    server: QdrantServer, snapshot: Snapshot, connected: Qdrant
) -> None:
    name = connected.name(snapshot.version)
    server.local.create_collection(name, models.VectorParams(size=3, distance=models.Distance.COSINE))
    upload(connected, snapshot, queries, FLOOR)
    assert connected.open(snapshot).search(queries(), 1)[1].shape == (len(queries()), 1)


def test_a_pruned_version_is_removed_from_the_server_first(server: QdrantServer, collection: Collection) -> None:
    first, second = collection.versions()
    third = add_version(collection, 3, 10)
    for version in (first, second, third):
        publish(collection, version, MEASURE)
    server.refuse = lambda method, path: 500 if method == "DELETE" else None
    with pytest.raises(DatabaseAway):
        prune(collection, 1, 0.0)
    assert collection.versions() == [first, second, third]
    server.refuse = lambda method, path: None
    assert prune(collection, 1, 0.0) == [first]
    assert server.collections() == [f"care-{second}", f"care-{third}"]
    assert collection.versions() == [second, third]


def test_a_hanging_server_counts_as_unreachable(server: QdrantServer, snapshot: Snapshot) -> None:
    released = threading.Event()

    def hang(method: str, path: str) -> int:
        released.wait(60)
        return 500

    server.refuse = hang
    database = Database.parse(server.where(), None, timeout_seconds=1)
    assert database is not None
    try:
        with closing(database.connect()) as connected, pytest.raises(DatabaseAway, match="ReadTimeout"):
            connected.holds(snapshot)
    finally:
        released.set()


def test_a_key_is_sent_and_a_wrong_one_is_named(server: QdrantServer, snapshot: Snapshot) -> None:
    server.key = "secret"
    guessing = database_of(server, "guess").connect()
    with closing(guessing), pytest.raises(DatabaseAway, match="CARE_VECTORS_KEY"):
        guessing.holds(snapshot)
    with closing(database_of(server, "secret").connect()) as connected:
        assert not connected.holds(snapshot)

"""A worker of the cluster and the handling of its answers. Ray itself is tested in tests/integration/test_ray.py."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from indexer.cluster import Cluster, ShardWorker, count_texts
from indexer.errors import BadCluster
from indexer.store.shards import Shards
from models.errors import BadEncoder
from tests.support.fast_encoder import DIM, FastEncoder


def answer(worker: ShardWorker, *texts: str) -> dict[str, Any]:
    (row,) = worker(pa.table({"texts": [list(texts)]})).to_pylist()
    return row


def broken() -> FastEncoder:
    raise BadEncoder("/models/x: encoder.json is missing")


def test_a_shard_is_written_by_the_node_that_encoded_it(tmp_path: Path) -> None:
    place = Shards(tmp_path)
    row = answer(ShardWorker(FastEncoder, "fast", place), "高血压", "糖尿病")
    assert row == {"node": socket.gethostname(), "texts": 2, "name": row["name"], "problem": ""}
    (shard,) = place.read(DIM)
    assert len(shard.vectors) == 2
    assert count_texts(row, place) == 2


def test_an_encoder_that_a_node_cannot_open_is_named_with_the_node(tmp_path: Path) -> None:
    place = Shards(tmp_path)
    row = answer(ShardWorker(broken, "fast", place), "a")
    with pytest.raises(BadCluster, match=f"node {socket.gethostname()}: /models/x: encoder.json is missing"):
        count_texts(row, place)


def test_a_node_with_another_encoder_is_refused(tmp_path: Path) -> None:
    place = Shards(tmp_path)
    row = answer(ShardWorker(FastEncoder, "other", place), "a")
    with pytest.raises(BadCluster, match="its encoder is fast, this machine's other; copy the same folder"):
        count_texts(row, place)
    assert list(place.read(DIM)) == []


def test_other_errors_on_a_node_are_reported_and_logged_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    place = Shards(tmp_path / "file" / "shards")
    row = answer(ShardWorker(FastEncoder, "fast", place), "a")
    with pytest.raises(BadCluster, match=f"node {socket.gethostname()}: NotADirectoryError: .*file/shards"):
        count_texts(row, place)
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_is_not_shared_is_noticed_at_the_first_shard(tmp_path: Path) -> None:
    row = answer(ShardWorker(FastEncoder, "fast", Shards(tmp_path / "theirs")), "a")
    with pytest.raises(BadCluster, match=r"is not the .* of this machine; give --shards a folder that all nodes mount"):
        count_texts(row, Shards(tmp_path / "ours"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:", "127.0.0.1:99999"])
def test_an_address_without_a_listener_is_refused_at_once(address: str) -> None:
    with pytest.raises(BadCluster, match=f"no Ray cluster answers at {address} .*; give local, auto or HOST:PORT"):
        Cluster(address, FastEncoder).require()


def test_rays_client_address_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadCluster, match=r"ray://head:10001: .* run the command on a node of the cluster"):
        Cluster("ray://head:10001", FastEncoder).require()

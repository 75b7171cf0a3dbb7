"""`care index` with a vector database, as a schedule calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli
from indexer.store.collection import Collection
from indexer.store.kinds import IndexKind
from indexer.store.manifest import Manifest
from tests.support.qdrant_server import QdrantServer, qdrant

pytestmark = pytest.mark.usefixtures("keep_signals")

ROWS = [
    {"_id": f"d{number}", "title": title, "text": f"{title}的处理和用药。", "metadata": {"number": number}}
    for number, title in enumerate(["高血压", "糖尿病", "发热", "骨折"])
]


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    with qdrant() as server:
        yield server


def test_every_command_that_changes_the_served_version_changes_the_database(
    server: QdrantServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, root = tmp_path / "corpus.jsonl", tmp_path / "collection"

    def care(action: str, *arguments: str) -> int:
        return cli.main(["index", action, *arguments, "--collection", str(root)])

    def build(rows: int, *arguments: str) -> int:
        corpus.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS[:rows]), encoding="utf-8")
        return care("build", str(corpus), "--threads", "1", *arguments)

    assert build(2, "--publish", "--vectors", server.where()) == 0
    collection = Collection(root)
    (first,) = collection.versions()
    assert Manifest.read(collection.folder(first)).built.index is IndexKind.FLAT
    monkeypatch.setenv("CARE_VECTORS", server.where())
    assert build(3) == 0
    assert server.aliases() == {"care": f"care-{first}"}
    assert care("publish") == 0
    _, second = collection.versions()
    assert server.aliases() == {"care": f"care-{second}"}
    assert care("rollback") == 0
    assert (collection.current(), server.aliases()) == (first, {"care": f"care-{first}"})
    assert build(4, "--publish", "--keep", "1") == 0
    third = collection.versions()[-1]
    assert care("prune", "--keep", "1") == 0
    assert server.collections() == [f"care-{version}" for version in collection.versions()]
    assert server.aliases() == {"care": f"care-{third}"}
    capsys.readouterr()


def test_canaries_are_run_on_the_database(
    server: QdrantServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, canaries, root = tmp_path / "corpus.jsonl", tmp_path / "canaries.jsonl", tmp_path / "collection"
    corpus.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    # Shares no word with any document: only vectors find it.
    canary = {"query": "insulin", "must": ["d0", "d1", "d2", "d3"], "within": 4}
    canaries.write_text(json.dumps(canary, ensure_ascii=False) + "\n", encoding="utf-8")
    where = ("--vectors", server.where(), "--collection", str(root))
    build = ["index", "build", str(corpus), "--threads", "1", "--publish", "--canaries", str(canaries), *where]
    assert cli.main(build) == 0
    (version,) = Collection(root).versions()
    server.local.delete(f"care-{version}", [1])
    assert cli.main(["index", "publish", version, *where]) == 1
    assert "canaries fail: 'insulin' lacks d1" in capsys.readouterr().err
    assert cli.main(["index", "publish", version, "--force", *where]) == 0


def test_an_unreachable_database_ends_the_run_with_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, root = tmp_path / "corpus.jsonl", tmp_path / "collection"
    corpus.write_text(json.dumps(ROWS[0], ensure_ascii=False) + "\n", encoding="utf-8")
    options = ["--publish", "--threads", "1", "--vectors", "qdrant+http://127.0.0.1:1/care", "--collection", str(root)]
    assert cli.main(["index", "build", str(corpus), *options]) == 75
    assert "the vector database does not answer" in capsys.readouterr().err
    assert Collection(root).current() is None
    with pytest.raises(SystemExit):
        cli.main(["index", "publish", "--vectors", "qdrant", "--collection", str(root)])
    assert "neither faiss nor like qdrant+http://host:6333/alias" in capsys.readouterr().err

"""Differences between two versions, and canaries of a version."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import checks as diff
from indexer.build import BuildSummary, build
from indexer.checks import (
    ChangedAnswer,
    check_canaries,
    compare_answers,
    compare_documents,
    load_queries,
    top_documents,
)
from indexer.errors import BadQueries, Blocked
from indexer.store.canaries import Canary, load_canaries
from indexer.store.collection import Collection
from indexer.store.documents import Documents, DocumentsWriter
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import OnnxEncoder
from tests.unit.indexer.support import write_lines

CORPUS = {"age": st.integers(0, 2)}
ROWS = [
    {"_id": "hypertension", "title": "高血压用药", "text": "氨氯地平是治疗高血压的常用药。"},
    {"_id": "diabetes", "title": "糖尿病饮食", "text": "糖尿病人应当控制主食，监测血糖。"},
    {"_id": "fever", "title": "发热处理", "text": "发热超过38.5度可以服用布洛芬。"},
    {"_id": "title-only", "title": "骨折固定", "text": ""},
]


def documents(folder: Path, contents: dict[int, int]) -> Documents:
    """Writes documents named by the keys; the values stand for their texts."""
    writer = DocumentsWriter(folder, ExitStack())
    for name, content in contents.items():
        writer.add(str(name), "", str(content), {})
    return Documents.open(folder, writer.close())


@given(
    old=st.dictionaries(st.integers(0, 12), st.integers(0, 2), min_size=1),
    new=st.dictionaries(st.integers(0, 12), st.integers(0, 2), min_size=1),
    block=st.sampled_from([1, 3, 100]),
)
def test_added_changed_and_removed_documents_are_found(
    tmp_path_factory: pytest.TempPathFactory, old: dict[int, int], new: dict[int, int], block: int
) -> None:
    before, after = (documents(tmp_path_factory.mktemp("documents"), contents) for contents in (old, new))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff, "BLOCK", block)
        found = compare_documents(before, after)
    assert {int(after.get(row).id) for row in found.added.tolist()} == new.keys() - old.keys()
    assert {int(before.get(row).id) for row in found.removed.tolist()} == old.keys() - new.keys()
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    assert {int(after.get(row).id) for row in found.changed.tolist()} == changed
    assert all((np.diff(rows) > 0).all() for rows in (found.added, found.changed, found.removed))


@pytest.fixture(scope="module")
def built(encoder: OnnxEncoder, tmp_path_factory: pytest.TempPathFactory) -> list[BuildSummary]:
    """Builds a version of all rows, and one without the first."""
    folder = tmp_path_factory.mktemp("versions")
    collection = Collection(folder / "collection")
    return [
        build([write_lines(folder / f"{len(rows)}.jsonl", *rows)], encoder, collection) for rows in (ROWS, ROWS[1:])
    ]


@pytest.fixture(scope="module")
def snapshots(built: list[BuildSummary]) -> list[Snapshot]:
    return [Snapshot.open(summary.folder) for summary in built]


def test_a_snapshot_is_searched_densely_and_lexically(snapshots: list[Snapshot], encoder: OnnxEncoder) -> None:
    answers = top_documents(snapshots[0], encoder, ["血压高吃什么药", "布洛芬", "摔断了腿怎么办"], k=1)
    assert answers == [["hypertension"], ["fever"], ["title-only"]]
    (everything,) = top_documents(snapshots[0], encoder, ["血压高吃什么药"])
    assert sorted(everything) == sorted(str(row["_id"]) for row in ROWS)


def test_the_encoders_trust_weights_dense_and_lexical_search_as_in_the_service(
    snapshots: list[Snapshot], encoder: OnnxEncoder
) -> None:
    trusting, doubting = copy(encoder), copy(encoder)
    trusting.spec = encoder.spec.model_copy(update={"dense_trust": 50.0})
    doubting.spec = encoder.spec.model_copy(update={"dense_trust": -50.0})
    asked = ["体温很高，常用什么"]
    assert top_documents(snapshots[0], trusting, asked, k=1) == [["fever"]]
    assert top_documents(snapshots[0], doubting, asked, k=1) == [["hypertension"]]


def test_changed_answers_are_listed(snapshots: list[Snapshot], encoder: OnnxEncoder) -> None:
    old, new = snapshots
    (changed,) = compare_answers(old, new, encoder, ["血压高吃什么药"])
    assert changed == ChangedAnswer("血压高吃什么药", came=[], went=["hypertension"])
    assert compare_answers(old, old, encoder, ["血压高吃什么药"]) == []


def test_canaries_pass_a_good_snapshot_and_block_a_bad_one(snapshots: list[Snapshot], encoder: OnnxEncoder) -> None:
    canaries = [
        Canary(query="血压高吃什么药", must=("hypertension",), within=1),
        Canary(query="发烧", must=("fever", "diabetes")),
    ]
    collection, (good, bad) = Collection(snapshots[0].folder.parents[1]), (one.version for one in snapshots)
    check_canaries(collection, good, encoder, canaries)
    message = r"is not published: 1 of 2 canaries fail: '血压高吃什么药' lacks hypertension among its first 1\."
    with pytest.raises(Blocked, match=message):
        check_canaries(collection, bad, encoder, canaries)
    (collection.root / "CURRENT").write_text(bad, encoding="utf-8")
    with pytest.raises(Blocked, match=f"{bad}, which is served, is not as it should be: 1 of 2 canaries fail"):
        check_canaries(collection, bad, encoder, canaries)
    too_deep = Canary(query="发烧", must=("fever", "diabetes"), within=1)
    with pytest.raises(Blocked, match="lacks diabetes among its first 1"):
        check_canaries(collection, good, encoder, [*canaries, too_deep])


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_canaries_are_read_from_json_lines(tmp_path: Path, mark: bytes) -> None:
    path = write_lines(
        tmp_path / "c.jsonl", {"query": "发烧", "must": ["fever"]}, b"", {"query": "q", "must": ["a", "b"], "within": 3}
    )
    path.write_bytes(mark + path.read_bytes())
    assert load_canaries(path) == [
        Canary(query="发烧", must=("fever",), within=10),
        Canary(query="q", must=("a", "b"), within=3),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{", "c.jsonl:2: Invalid JSON"),
        ({"query": "q"}, "c.jsonl:2: must: Field required"),
        ({"query": "q", "must": []}, "c.jsonl:2: .*at least 1"),
        ({"query": "", "must": ["a"]}, "c.jsonl:2: .*at least 1"),
        ({"query": "q", "must": ["a"], "within": 0}, "c.jsonl:2: within: .*greater than 0"),
        ({"query": "q", "must": ["a"], "width": 1}, "c.jsonl:2: width: Extra inputs"),
    ],
)
def test_an_invalid_canary_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(BadQueries, match=message):
        load_canaries(write_lines(tmp_path / "c.jsonl", {"query": "q", "must": ["a"]}, row))


def test_files_without_queries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadQueries, match="holds no query"):
        load_canaries(write_lines(tmp_path / "c.jsonl"))
    with pytest.raises(BadQueries, match="cannot be read"):
        load_canaries(tmp_path / "nowhere")
    with pytest.raises(BadQueries, match="holds no query"):
        load_queries(write_lines(tmp_path / "c.jsonl"))
    for row in (b"{", [], {"query": "q"}):
        with pytest.raises(BadQueries, match="is not a file of queries"):
            load_queries(write_lines(tmp_path / "q.jsonl", row))


def test_queries_are_read_from_json_lines(tmp_path: Path) -> None:
    assert load_queries(write_lines(tmp_path / "q.jsonl", {"_id": "1", "text": "发烧"}, b"")) == ["发烧"]

"""From corpus files to a searchable snapshot, with the bundled encoder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, BuildSummary, build
from indexer.corpus import FieldMap
from indexer.encode import content_hashes
from indexer.errors import BadBuild, BadCorpus
from indexer.store.collection import Collection
from indexer.store.filters import AnyOf, Equal, Range
from indexer.store.kinds import IndexKind
from indexer.store.snapshot import Snapshot
from indexer.versions import publish
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from models.lexical import LexicalIndex

LONG = "阑尾炎的典型表现是转移性右下腹痛。" * 30 + "术后第三天可以淋浴，伤口保持干燥。" + "饮食应当循序渐进。" * 60
CORPUS = [
    {
        "_id": "d1",
        "title": "高血压",
        "text": "高血压患者应低盐饮食，常用药物有氨氯地平和缬沙坦。",
        "metadata": {"kind": "disease"},
    },
    {
        "_id": "d2",
        "title": "糖尿病",
        "text": "二型糖尿病首选二甲双胍，并控制饮食。",
        "metadata": {"kind": "disease", "year": 2024},
    },
    {"_id": "t1", "title": "血常规", "text": "白细胞升高常提示细菌感染。", "metadata": {"kind": "test", "year": 2025}},
    {
        "_id": "e1",
        "title": "CPR",
        "text": "Push hard and fast in the centre of the chest.",
        "metadata": {"kind": "aid"},
    },
    {"_id": "l1", "title": "阑尾炎", "text": LONG, "metadata": {"kind": "disease", "tags": ["外科", "腹痛"]}},
    {"_id": "n1", "title": "骨折的现场固定", "text": "", "metadata": {"kind": "aid"}},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in CORPUS), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[IndexKind.FLAT, IndexKind.HNSW])
def built(
    request: pytest.FixtureRequest, corpus: Path, encoder: OnnxEncoder, tmp_path_factory: pytest.TempPathFactory
) -> BuildSummary:
    collection = Collection(tmp_path_factory.mktemp("collection"))
    options = BuildOptions(index=request.param, passage_tokens=128, overlap=16, threads=1)
    return build([corpus], encoder, collection, options)


@pytest.fixture(scope="module")
def snapshot(built: BuildSummary) -> Snapshot:
    return Snapshot.open(built.folder)


def found_ids(snapshot: Snapshot, encoder: OnnxEncoder, query: str, k: int = 1, mask: object = None) -> list[str]:
    allowed = None if mask is None else np.asarray(mask)[snapshot.passages.documents]
    _, rows = snapshot.vectors.search(encoder.encode([query], Side.QUERY), k, allowed)
    return [snapshot.documents.get(int(snapshot.passages.documents[row])).id for row in rows[0] if row >= 0]


def test_summary_and_manifest_agree(built: BuildSummary, snapshot: Snapshot, encoder: OnnxEncoder) -> None:
    manifest = snapshot.manifest
    assert manifest.version == built.version == built.folder.name
    assert manifest.counts == built.counts
    assert built.counts.documents == len(CORPUS)
    assert built.counts.passages > len(CORPUS)
    assert (manifest.space, manifest.dim) == (encoder.spec.space, encoder.spec.dim)
    assert (manifest.encoder.fingerprint, manifest.encoder.variant) == (encoder.fingerprint, encoder.variant)
    assert (manifest.built.index, manifest.built.passage_tokens, manifest.built.passage_overlap) == (
        built.index,
        128,
        16,
    )
    assert list(built.seconds) == ["read", "encode", "index", "lexical", "write"]
    assert built.rejects_file is None
    assert built.reused == 0  # repeated texts are encoded once, which does not count as reuse
    assert built.encoded < built.counts.passages
    assert (built.recall is None) == (built.index is IndexKind.FLAT)
    assert manifest.built.recall == built.recall
    manifest.require_encoder(encoder.spec)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("血压高吃什么药", "d1"),
        ("二甲双胍治什么病", "d2"),
        ("白细胞偏高", "t1"),
        ("chest compressions", "e1"),
        ("腿摔断了先怎么固定", "n1"),
    ],
)
def test_dense_search_finds_the_document(snapshot: Snapshot, encoder: OnnxEncoder, query: str, expected: str) -> None:
    assert found_ids(snapshot, encoder, query) == [expected]


def test_a_passage_of_a_long_document_is_found_as_that_document(snapshot: Snapshot, encoder: OnnxEncoder) -> None:
    query = "阑尾炎手术后什么时候可以洗澡"
    _, rows = snapshot.vectors.search(encoder.encode([query], Side.QUERY), 1)
    row = int(rows[0, 0])
    document = snapshot.documents.get(int(snapshot.passages.documents[row]))
    start, end = snapshot.passages.span(row)
    assert document.id == "l1"
    assert document.text == LONG
    assert "可以淋浴" in document.text[start:end]


def test_lexical_search_finds_whole_documents_by_the_row_of_their_first_passage(snapshot: Snapshot) -> None:
    owners = snapshot.passages.documents
    assert snapshot.documents.get(int(owners[snapshot.lexical.search("缬沙坦", 1)[0][0]])).id == "d1"
    assert snapshot.documents.get(int(owners[snapshot.lexical.search("CPR", 1)[0][0]])).id == "e1"
    long = snapshot.documents.row_of("l1")
    assert long is not None
    first, *later = snapshot.passages.of(long)
    assert later
    for words in ("阑尾炎", "可以淋浴"):  # words of the title and of a later passage
        assert snapshot.lexical.search(words, 100)[0][0] == first
    texts = [f"{each.title}\n{each.text}" for each in map(snapshot.documents.get, range(len(snapshot.documents)))]
    whole = LexicalIndex.build(texts)
    for words in ("阑尾炎 淋浴", "血压高吃什么药", "CPR"):  # ranked and scored as in an evaluation
        rows, scores = snapshot.lexical.search(words, 100)
        expected = whole.search(words, 100)
        assert owners[rows].tolist() == expected[0].tolist()
        np.testing.assert_array_equal(scores, expected[1])


def test_filters_narrow_the_search(snapshot: Snapshot, encoder: OnnxEncoder) -> None:
    query = "血压高吃什么药"
    tests = snapshot.metadata.select([Equal("kind", "test")])
    assert found_ids(snapshot, encoder, query, 3, tests) == ["t1"]
    recent = snapshot.metadata.select([Range("year", gte=2024), AnyOf("kind", ("disease", "aid"))])
    assert found_ids(snapshot, encoder, query, 3, recent) == ["d2"]
    assert set(found_ids(snapshot, encoder, query, 3, snapshot.metadata.select([Equal("tags", "外科")]))) == {"l1"}


def test_vectors_are_those_of_title_and_passage(snapshot: Snapshot, encoder: OnnxEncoder) -> None:
    text = "高血压\n高血压患者应低盐饮食，常用药物有氨氯地平和缬沙坦。"
    stored = snapshot.vectors.values[0].astype(np.float32)
    assert float(stored @ encoder.encode([text], Side.DOCUMENT)[0]) > 0.99
    assert snapshot.hashes[0].tobytes() == content_hashes([text], encoder)[0].tobytes()


def test_bad_rows_stop_the_build_and_leave_no_version(tmp_path: Path, corpus: Path, encoder: OnnxEncoder) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(corpus.read_bytes() + b"{broken\n")
    collection = Collection(tmp_path / "collection")
    with pytest.raises(BadCorpus, match=r"1 bad rows: .*bad\.jsonl:7: not JSON.*--skip-bad"):
        build([bad], encoder, collection)
    assert collection.versions() == []
    assert list((collection.root / "versions").iterdir()) == []


def test_bad_rows_are_set_aside_and_counted(tmp_path: Path, encoder: OnnxEncoder) -> None:
    path = tmp_path / "corpus.csv"
    path.write_text("doc,body\n1,感冒多喝水。\n1,again\n2,\n", encoding="utf-8")
    collection = Collection(tmp_path / "collection")
    options = BuildOptions(fields=FieldMap(id="doc", text="body"), skip_bad=True)
    summary = build([path], encoder, collection, options)
    assert (summary.counts.documents, summary.counts.rejects, summary.index) == (1, 2, IndexKind.FLAT)
    assert summary.rejects_file is not None
    reasons = [json.loads(line)["reason"] for line in summary.rejects_file.read_text(encoding="utf-8").splitlines()]
    assert reasons[0].startswith("repeated id '1'")
    assert reasons[1].startswith("neither text")
    publish(collection)
    assert collection.current() == summary.version


def test_a_query_encoder_is_refused_for_documents(tmp_path: Path, corpus: Path, encoder: OnnxEncoder) -> None:
    spec = encoder.spec.model_copy(update={"sides": (Side.QUERY,)})
    queries_only = OnnxEncoder(spec, encoder.variant, encoder.tokenizer, encoder._session)
    with pytest.raises(BadBuild, match="reads queries only"):
        build([corpus], queries_only, Collection(tmp_path))


def test_passages_longer_than_the_encoder_reads_are_refused(tmp_path: Path, corpus: Path, encoder: OnnxEncoder) -> None:
    with pytest.raises(BadBuild, match="passages of 513 tokens: the encoder reads at most 512"):
        build([corpus], encoder, Collection(tmp_path), BuildOptions(passage_tokens=513))


def test_building_does_not_need_torch() -> None:
    code = "import sys, indexer.build, indexer.versions; print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

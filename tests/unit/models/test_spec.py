import json
from pathlib import Path

import pytest

from models.encoder.spec import SPEC_FILE, EncoderSpec, Pooling, Side, sha256_of, verify_file
from models.errors import BadEncoder


def a_spec(**changes: object) -> EncoderSpec:
    facts = {"architecture": "bert", "sides": ["query"], "pooling": "cls", "native_dim": 8, "dim": 4, "max_length": 16,
             "space": "test"}  # fmt: skip
    return EncoderSpec.model_validate(facts | changes)


def test_a_spec_is_read_as_saved(tmp_path: Path) -> None:
    spec = a_spec(query_instruction="找：", checksums={"a": "b"})
    spec.save(tmp_path)
    assert EncoderSpec.load(tmp_path) == spec
    assert "找：" in (tmp_path / SPEC_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dim": 9}, "dim 9 is larger"),
        ({"pooling": "max"}, "pooling"),
        ({"query_template": "Query: "}, "must hold {instruction}"),
        ({"colour": "red"}, "colour"),
        ({"space": ""}, "space"),
    ],
)
def test_the_error_for_an_invalid_spec_names_the_field(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    facts = a_spec().model_dump(mode="json") | changes
    (tmp_path / SPEC_FILE).write_text(json.dumps(facts))
    with pytest.raises(BadEncoder, match=named):
        EncoderSpec.load(tmp_path)


def test_a_folder_without_a_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadEncoder, match="is missing"):
        EncoderSpec.load(tmp_path)


def test_the_fingerprint_changes_with_everything_that_changes_a_vector() -> None:
    base = a_spec(checksums={"model.onnx": "1", "tokenizer.json": "2"})
    prints = {
        base.fingerprint("model.onnx"),
        base.model_copy(update={"dim": 3}).fingerprint("model.onnx"),
        base.model_copy(update={"document_instruction": "x"}).fingerprint("model.onnx"),
        base.model_copy(update={"pooling": Pooling.MEAN}).fingerprint("model.onnx"),
        base.model_copy(update={"checksums": {"model.onnx": "9", "tokenizer.json": "2"}}).fingerprint("model.onnx"),
        base.model_copy(update={"checksums": {"model.onnx": "1", "tokenizer.json": "9"}}).fingerprint("model.onnx"),
    }
    assert len(prints) == 6
    assert base.model_copy(update={"query_template": "{instruction} "}).fingerprint("model.onnx") in prints
    assert base.model_copy(update={"sides": (Side.DOCUMENT,)}).fingerprint("model.onnx") in prints


def test_an_encoder_is_identified_only_by_its_weights() -> None:
    graph = a_spec(checksums={"model.onnx": "1", "tokenizer.json": "2"})
    assert graph.identities == graph.model_copy(update={"query_instruction": "x", "max_length": 8}).identities
    for change in ({"model.onnx": "9", "tokenizer.json": "2"}, {"model.onnx": "1", "tokenizer.json": "9"}):
        assert not graph.identities & graph.model_copy(update={"checksums": change}).identities
    both = a_spec(checksums={"model.onnx": "1", "model.int8.onnx": "3", "tokenizer.json": "2"})
    assert graph.identities < both.identities
    assert not a_spec().identities  # its weights have no checksum


def test_another_query_instruction_does_not_change_the_document_fingerprint() -> None:
    """Unless documents are read as queries, as the query encoder of a pair reads fresh ones."""
    both = {"sides": (Side.QUERY, Side.DOCUMENT)}
    base = a_spec(checksums={"model.onnx": "1", "tokenizer.json": "2"}).model_copy(update=both)
    asking = base.model_copy(update={"query_instruction": "x"})
    assert asking.fingerprint("model.onnx") == base.fingerprint("model.onnx")
    assert asking.fingerprints == base.fingerprints
    one, other = (each.model_copy(update={"sides": (Side.QUERY,)}) for each in (base, asking))
    assert one.fingerprint("model.onnx") != other.fingerprint("model.onnx")


def test_an_altered_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"right")
    spec = a_spec(checksums={"weights": sha256_of(tmp_path / "weights"), "gone": "0"})
    assert verify_file(tmp_path, "weights", spec) == tmp_path / "weights"
    (tmp_path / "weights").write_bytes(b"wrong")
    with pytest.raises(BadEncoder, match="weights was altered"):
        verify_file(tmp_path, "weights", spec)
    with pytest.raises(BadEncoder, match="gone is missing"):
        verify_file(tmp_path, "gone", spec)
    (tmp_path / "unknown").write_bytes(b"")
    with pytest.raises(BadEncoder, match="no checksum for unknown"):
        verify_file(tmp_path, "unknown", spec)


def test_a_query_encoder_reads_documents_as_queries() -> None:
    assert a_spec(sides=["query", "document"]).document_side is Side.DOCUMENT
    assert a_spec(sides=["query"]).document_side is Side.QUERY

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.encoder.onnx import OnnxEncoder, bulk_batches
from models.encoder.spec import EncoderSpec, Side, Variant, sha256_of
from models.errors import BadEncoder

BUNDLED = Path("models/pretrained/care-small-zh")
TEXTS = ["高血压吃什么药", "What lowers blood pressure?", "糖" * 700, "", "布洛芬"]


@pytest.fixture(scope="module")
def encoder() -> OnnxEncoder:
    return OnnxEncoder.load(BUNDLED, threads=1)


def test_vectors_have_unit_length_and_the_stated_dimension(encoder: OnnxEncoder) -> None:
    vectors = encoder.encode(TEXTS, Side.QUERY)
    assert vectors.shape == (len(TEXTS), encoder.spec.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_a_vector_does_not_depend_on_the_texts_beside_it(encoder: OnnxEncoder) -> None:
    alone = np.concatenate([encoder.encode([text], Side.QUERY) for text in TEXTS])
    np.testing.assert_array_equal(encoder.encode(TEXTS, Side.QUERY), alone)


def test_related_texts_are_closer_than_unrelated_ones(encoder: OnnxEncoder) -> None:
    query, near, far = encoder.encode(["血压高怎么办", "高血压的治疗", "骨折后的固定"], Side.QUERY)
    assert query @ near > query @ far


def test_an_instruction_changes_the_tokens(encoder: OnnxEncoder) -> None:
    told = OnnxEncoder(
        encoder.spec.model_copy(update={"query_instruction": "检索："}), encoder.variant, encoder.tokenizer,
        encoder._session,
    )  # fmt: skip
    assert told.tokenize(["发热"], Side.QUERY) == encoder.tokenize(["检索：发热"], Side.QUERY)
    assert told.tokenize(["发热"], Side.DOCUMENT) == encoder.tokenize(["发热"], Side.DOCUMENT)


def test_an_altered_graph_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "encoder")
    with (folder / Variant.INT8.filename).open("r+b") as file:
        file.seek(1000)
        file.write(b"\x00\x01\x02")
    with pytest.raises(BadEncoder, match="altered"):
        OnnxEncoder.load(folder)


@pytest.mark.parametrize("name", [Variant.INT8.filename, "tokenizer.json"])
def test_an_invalid_graph_or_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "encoder")
    (folder / name).write_bytes(b"nonsense")
    spec = EncoderSpec.load(folder)
    spec.model_copy(update={"checksums": spec.checksums | {name: sha256_of(folder / name)}}).save(folder)
    with pytest.raises(BadEncoder, match="export the encoder again"):
        OnnxEncoder.load(folder)


def test_a_graph_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "encoder")
    EncoderSpec.load(folder).model_copy(update={"dim": 100}).save(folder)
    with pytest.raises(BadEncoder, match="512 dimensions"):
        OnnxEncoder.load(folder)


def test_more_tokens_than_the_graph_has_positions_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "encoder")
    EncoderSpec.load(folder).model_copy(update={"max_length": 600}).save(folder)
    encoder = OnnxEncoder.load(folder)
    assert encoder.encode(["糖" * 510], Side.QUERY).shape == (1, 512)
    message = (
        r"fails on 600 tokens; if max_length in encoder\.json was raised to 600, restore the exported number \(.+\)"
    )
    with pytest.raises(BadEncoder, match=message):
        encoder.encode(["糖" * 700], Side.QUERY)


def test_the_error_for_a_folder_without_a_graph_says_how_to_get_one(tmp_path: Path) -> None:
    EncoderSpec.load(BUNDLED).save(tmp_path)
    with pytest.raises(BadEncoder, match="care export"):
        OnnxEncoder.load(tmp_path)


def test_a_missing_device_is_refused_rather_than_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BadEncoder, match="device cuda: ONNX Runtime has no CUDAExecutionProvider here"):
        OnnxEncoder.load(BUNDLED, Variant.INT8, device="cuda")


@given(st.lists(st.integers(1, 512), max_size=200), st.integers(1, 4096))
def test_bulk_batches_have_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(bulk_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= budget


def test_on_a_cpu_no_addition_is_fused_with_its_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel is slower there."""
    open_session = ort.InferenceSession

    def watched(graph: str, options: ort.SessionOptions, **settings: object) -> ort.InferenceSession:
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        return open_session(graph, options, **settings)

    monkeypatch.setattr(ort, "InferenceSession", watched)
    OnnxEncoder.load(BUNDLED, threads=1)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert kinds["SkipLayerNormalization"] == 0
    assert kinds["LayerNormalization"] == 9

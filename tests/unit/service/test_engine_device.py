"""The engine's devices: the CPU, and the parts of the GPU code that run on any machine."""

from __future__ import annotations

import sys
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.store.kinds import IndexKind
from indexer.store.vectors import VectorIndex
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens, flatten, pad, pad_flat
from service.engine.cuda import (
    LENGTH_STEP,
    MOST_K,
    MOST_SHAPES,
    NOT_RECORDED,
    RECORDED,
    RECORDED_QUERIES,
    RECORDED_TOKENS,
    RECORDING,
    BoundEncoder,
    FlatVectors,
    build_flat,
    next_shape,
    open_session,
    watch_memory,
)
from service.engine.device import Cpu, CpuEncoder, CpuVectors
from service.engine.selfcheck import check_encoder, check_search, random_index, random_tokens
from service.errors import BadDevice
from service.serving.serving import Selection

ENCODER = Path("models/pretrained/care-small-zh")
TEXTS = ["高血压吃什么药", "fever", "糖尿病人可以吃西瓜吗", "头" * 40, "骨折", "哮喘 inhaler"]


@pytest.fixture(scope="module")
def encoder() -> OnnxEncoder:
    return OnnxEncoder.load(ENCODER, threads=1)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8))
def test_padding_flat_tokens_equals_padding_lists_of_tokens(batch: list[list[int]]) -> None:
    tokens = [Tokens(ids, truncated=False) for ids in batch]
    for ours, theirs in zip(pad_flat(*flatten(tokens)), pad(tokens), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_cpu_gives_each_query_its_own_embedding(encoder: OnnxEncoder) -> None:
    tokens = encoder.tokenize(TEXTS, Side.QUERY)
    together = CpuEncoder(encoder).encode(*flatten(tokens))
    for one, vector in zip(tokens, together, strict=True):
        alone = encoder.encode_tokens([one])[0]
        assert float(vector @ alone) > 0.98  # in int8 the scale of an activation depends on the whole call


def test_bound_buffers_give_the_results_of_plain_runs(encoder: OnnxEncoder) -> None:
    bound = BoundEncoder(encoder, encoder._session, "cpu")
    for texts in (TEXTS[:1], TEXTS, TEXTS[1:2], TEXTS):
        tokens = encoder.tokenize(texts, Side.QUERY)
        vectors = bound.encode(*flatten(tokens))
        assert vectors.shape == (len(texts), encoder.spec.dim)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        for one, vector in zip(tokens, vectors, strict=True):
            assert float(vector @ encoder.encode_tokens([one])[0]) > 0.98


def test_an_answer_is_unchanged_when_its_buffers_are_reused(encoder: OnnxEncoder) -> None:
    bound = BoundEncoder(encoder, encoder._session, "cpu")
    first, second = (flatten(encoder.tokenize([text], Side.QUERY)) for text in ("发热", "骨折"))
    vector = bound.encode(*first)
    kept = vector.copy()
    bound.encode(*second)
    np.testing.assert_array_equal(vector, kept)


@given(st.integers(1, 600), st.integers(1, 512))
def test_padded_shapes_are_few_and_large_enough(queries: int, longest: int) -> None:
    rows, length = next_shape(queries, longest, 512)
    assert queries <= rows <= min(2 * queries, queries + 31)
    assert longest <= length <= 512
    assert length == 512 or length % LENGTH_STEP == 0


def test_buffers_are_kept_for_a_bounded_number_of_shapes(encoder: OnnxEncoder) -> None:
    bound = BoundEncoder(encoder, encoder._session, "cpu")
    for number in range(MOST_SHAPES + 5):
        bound._of_shape((16, number + 1))
    kept = bound._buffers.cache_info()
    assert (kept.currsize, kept.hits) == (MOST_SHAPES, 0)
    bound._of_shape((16, MOST_SHAPES + 5))
    bound._of_shape((16, 1))
    assert (bound._buffers.cache_info().hits, bound._buffers.cache_info().misses) == (1, kept.misses + 1)


def test_small_shapes_keep_their_buffers_whose_addresses_recorded_kernels_use(encoder: OnnxEncoder) -> None:
    bound = BoundEncoder(encoder, encoder._session, "cpu")
    small = [bound._of_shape(shape) for shape in RECORDED]
    for number in range(MOST_SHAPES + 5):
        bound._of_shape((16, number + 1))
    assert all(bound._of_shape(shape) is kept for shape, kept in zip(RECORDED, small, strict=True))
    numbers = [kept.options.get_run_config_entry(RECORDING) for kept in small]
    assert len(set(numbers)) == len(RECORDED)
    assert bound._of_shape((16, 1)).options.get_run_config_entry(RECORDING) == str(NOT_RECORDED)


@given(st.integers(1, RECORDED_QUERIES), st.integers(1, RECORDED_TOKENS))
def test_every_small_batch_has_a_shape_recorded_at_startup(queries: int, longest: int) -> None:
    assert next_shape(queries, longest, 512) in RECORDED


def test_a_gpu_flat_index_finds_the_same_rows_as_the_snapshots_index() -> None:
    own = random_index(500, 16)
    index = faiss.IndexFlatIP(16)
    index.add(own.values.astype(np.float32))
    plain = CpuVectors(own, 1)
    flat = FlatVectors(index, plain)
    queries = np.random.default_rng(3).standard_normal((5, 16), np.float32)
    some = Selection((), lambda: np.arange(500) % 3 == 0)
    few = Selection((), lambda: np.arange(500) < 4)
    for selection in (None, some, some, few):
        for ours, theirs in zip(flat.search(queries, 10, selection), plain.search(queries, 10, selection), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert flat._parameters.cache_info().currsize == 2


def test_a_gpu_flat_index_falls_back_to_the_snapshots_index() -> None:
    own = random_index(MOST_K + 10, 4)
    flat = FlatVectors(faiss.IndexFlatIP(4), CpuVectors(own, 1))  # empty: every hit comes from the snapshot's index
    scores, rows = flat.search(np.ones((1, 4), np.float32), MOST_K + 5, None)
    assert (rows >= 0).all()
    assert np.isfinite(scores).all()


def test_a_machine_without_a_gpu_is_reported(encoder: OnnxEncoder) -> None:
    with pytest.raises(BadDevice, match="gpu extra"):
        open_session(ENCODER / encoder.variant.filename)
    with pytest.raises(BadDevice, match="gpu extra"):
        build_flat(np.ones((2, 4), np.float16))


def test_the_self_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    device = Cpu(1, 1)
    small = random_index(300, 512)
    assert check_search(device.open_vectors(small), small.values)
    assert "overlap 1.0000" in capsys.readouterr().out


def test_the_self_check_notices_a_wrong_device(encoder: OnnxEncoder) -> None:
    class Wrong:
        reader = encoder

        def encode(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            return np.roll(CpuEncoder(encoder).encode(ids, lengths), 1, axis=1)

    assert len(random_tokens(3, encoder)[1]) == 3
    assert not check_encoder(Wrong(), ENCODER, "cpu", batches=(2,))
    small = random_index(300, 16)
    other = VectorIndex(IndexKind.FLAT, small.values[::-1], faiss.IndexFlatIP(16))
    other.index.add(other.values.astype(np.float32))
    assert not check_search(CpuVectors(other, 1), small.values)


def test_gpu_memory_is_recorded_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"card": SimpleNamespace(used=5, total=9)}
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: "card",
        nvmlDeviceGetMemoryInfo=memory.get,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    recorded: Queue[tuple[int, int]] = Queue()
    watch_memory(lambda used, total: recorded.put((used, total)), seconds=3600)
    assert recorded.get(timeout=60) == (5, 9)


def test_a_gpu_that_cannot_be_queried_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # is not installed
    watch_memory(lambda used, total: pytest.fail("nothing can be recorded"))
    assert "the memory of the GPU is not measured" in caplog.text

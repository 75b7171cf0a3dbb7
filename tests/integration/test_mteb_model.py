"""The pair of encoders in real mteb code, on tasks made of our own sentences."""

import socket
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from models.errors import BadEncoder, SpaceMismatch
from models.evaluation.benchmarks import SetSpec
from models.evaluation.benchmarks.loader import from_mteb
from models.evaluation.encoders import OpenEncoder, open_encoder
from models.evaluation.judge import judge_one
from models.evaluation.mteb_model import MtebPair, RelevanceEvaluator
from models.evaluation.readers import EncoderReader
from models.evaluation.sets import Kind, Task
from models.evaluation.systems import Dense
from tests.support.tiny_models import WIDTH, tiny_encoder, tiny_spec

BUNDLED = Path("models/pretrained/care-small-zh")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every attempt to resolve an address fail at once."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("an address was resolved"))


@pytest.fixture(scope="module")
def ours() -> ModuleType:
    """Imports our tasks and mteb on demand: it takes seconds, too long for every process that collects this file."""
    from tests.support import mteb_tasks

    return mteb_tasks


@pytest.fixture(scope="module")
def bundled() -> MtebPair:
    return MtebPair.load(str(BUNDLED))


def scores(model: MtebPair, ours: ModuleType, task: str) -> dict[str, float]:
    tasks = [getattr(ours, task)()]
    results = ours.mteb.evaluate(model, tasks=tasks, cache=None, co2_tracker=False, show_progress_bar=False)
    return dict(results.task_results[0].scores[ours.SPLIT][0])


@pytest.mark.parametrize(
    ("task", "kind", "metric", "theirs"),
    [
        ("OurRetrieval", Kind.RETRIEVAL, "nDCG@10", "ndcg_at_10"),
        ("OurRetrieval", Kind.RETRIEVAL, "MRR@10", "mrr_at_10"),
        ("OurRetrieval", Kind.RETRIEVAL, "Recall@100", "recall_at_100"),
        ("OurReranking", Kind.RERANK, "MAP@10", "map_at_10"),
        ("OurSTS", Kind.STS, "Pearson", "cosine_pearson"),
        ("OurSTS", Kind.STS, "Spearman", "cosine_spearman"),
    ],
)
def test_mteb_and_our_evaluation_give_the_same_figures(
    bundled: MtebPair, ours: ModuleType, task: str, kind: Kind, metric: str, theirs: str
) -> None:
    """The same encoder on the same data, once through mteb and once through our own evaluation."""
    facts = {"name": "ours", "kind": kind, "metric": metric, "counts": {"queries": 1}, "obtain": "-"}
    loaded = getattr(ours, task)()
    loaded.load_data()
    judged = Task("ours", from_mteb(loaded, SetSpec.model_validate(facts)), kind, metric)
    system = Dense(EncoderReader(open_encoder(str(BUNDLED)), None))
    found = judge_one(judged, system).value
    assert found == pytest.approx(100 * scores(bundled, ours, task)[theirs], abs=1e-3)
    assert 20 < found <= 100


class Recorder:
    """Records the texts that it gets, and returns random unit vectors."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.asked.append(list(texts))
        vectors = np.random.default_rng(len(self.asked)).normal(size=(len(texts), WIDTH))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def recorded(name: str, recorder: Recorder, **change: object) -> OpenEncoder:
    return OpenEncoder(name, tiny_spec("bert").model_copy(update=change), f"fp-{name}", None, recorder)


def test_queries_and_documents_go_to_their_own_encoder_with_its_instruction(ours: ModuleType) -> None:
    query, document = Recorder(), Recorder()
    pair = MtebPair(
        recorded("small", query, query_instruction="问：", sides=(Side.QUERY,)),
        recorded("large", document, document_instruction="文：", sides=(Side.DOCUMENT,)),
    )
    scores(pair, ours, "OurRetrieval")
    assert query.asked == [[f"问：{text}" for text in ours.QUERIES.values()]]
    assert document.asked == [["文：" + f"{title} {text}".strip() for title, text in ours.DOCUMENTS.values()]]


def test_a_given_instruction_replaces_that_of_the_encoder() -> None:
    recorder = Recorder()
    encoder = recorded("small", recorder, query_instruction="问：", document_instruction="文：")
    pair = MtebPair(encoder, encoder, query_instruction="找药", document_instruction="")
    pair.encode([{"text": ["头痛"]}], prompt_type="query")
    pair.encode([{"text": ["止痛药"]}], prompt_type="document")
    assert recorder.asked == [["找药\nQuery: 头痛"], ["止痛药"]]
    meta = pair.mteb_model_meta
    assert meta.experiment_kwargs == {"query_instruction": "找药", "document_instruction": ""}
    assert MtebPair(encoder, encoder).mteb_model_meta != meta


def test_sentences_to_compare_are_read_as_queries(ours: ModuleType) -> None:
    query, document = Recorder(), Recorder()
    scores(MtebPair(recorded("small", query), recorded("large", document)), ours, "OurSTS")
    assert query.asked == [[first for first, _, _ in ours.PAIRS], [second for _, second, _ in ours.PAIRS]]
    assert document.asked == []


def test_a_pair_of_torch_folders_runs(ours: ModuleType, tmp_path: Path) -> None:
    tiny_encoder("bert", seed=1).save(tmp_path / "small")
    tiny_encoder("qwen3", seed=2).save(tmp_path / "large")
    pair = MtebPair.load(str(tmp_path / "small"), str(tmp_path / "large"))
    assert pair.mteb_model_meta.name == "care-search/small + large"
    assert 0 <= scores(pair, ours, "OurRetrieval")["ndcg_at_10"] <= 1
    batches = [{"text": ["感冒", "发烧"]}, {"text": ["骨折"]}]
    for prompt_type, encoder in (("query", tiny_encoder("bert", seed=1)), ("document", tiny_encoder("qwen3", seed=2))):
        expected = encoder.encode(["感冒", "发烧", "骨折"], Side(prompt_type))
        np.testing.assert_allclose(pair.encode(batches, prompt_type=prompt_type), expected, atol=1e-5)


@pytest.mark.parametrize("change", [{"space": "elsewhere"}, {"dim": 32}])
def test_encoders_of_two_spaces_are_refused_as_a_pair(change: dict[str, object]) -> None:
    with pytest.raises(SpaceMismatch, match="trained as a pair"):
        MtebPair(recorded("small", Recorder()), recorded("large", Recorder(), **change))


def test_a_document_encoder_is_refused_for_queries() -> None:
    document = recorded("large", Recorder(), sides=(Side.DOCUMENT,))
    with pytest.raises(BadEncoder, match="large: not made to read query texts"):
        MtebPair(document, document)


def test_mteb_gets_the_name_and_the_weights_of_the_model(bundled: MtebPair, ours: ModuleType) -> None:
    assert isinstance(bundled, ours.mteb.EncoderProtocol)
    meta = bundled.mteb_model_meta
    assert meta.name == "care-search/care-small-zh (int8)"
    assert meta.revision == OnnxEncoder.load(BUNDLED).fingerprint
    assert (meta.embed_dim, meta.max_tokens, meta.use_instructions) == (512, 512, False)


def test_the_stand_in_for_pytrec_eval_gives_mteb_the_same_scores(
    bundled: MtebPair, ours: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = ("OurRetrieval", "OurReranking")
    expected = [scores(bundled, ours, task) for task in tasks]
    metrics = ours.mteb._evaluators.retrieval_metrics
    monkeypatch.setattr(metrics.pytrec_eval, "RelevanceEvaluator", RelevanceEvaluator)
    found = [scores(bundled, ours, task) for task in tasks]
    assert found == expected
    assert found[0]["ndcg_at_10"] > 0.5

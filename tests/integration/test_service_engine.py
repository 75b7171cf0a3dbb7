"""The in-process engine on real indexes, against rankings computed by brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.filters import Equal
from indexer.store.kinds import IndexKind
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from models.fusion import LATER_DENSE, LATER_LEXICAL, Fusion, Mode, fuse
from service.engine.device import Cpu, searched_by
from service.engine.jobs import EncodeJob, Found, Job, Options, SearchJob
from service.engine.local import InProcessEngine
from service.serving.serving import Serving

TOPICS = ["高血压", "糖尿病", "发热", "骨折", "哮喘", "头痛", "贫血", "胃炎"]
QUERIES = ["高血压 头痛", "糖尿病人发热", "哮喘", "骨折以后贫血", "胃炎"]


@pytest.fixture(scope="module", params=[IndexKind.FLAT, IndexKind.HNSW])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, encoder: OnnxEncoder) -> Serving:
    """Builds 40 documents of very different lengths, so that a few hold most of the passages."""
    root: Path = tmp_path_factory.mktemp("engine")
    lines = []
    for number in range(40):
        topic = TOPICS[number % len(TOPICS)]
        text = f"第{number}条：{topic}的处理与注意事项，{TOPICS[(number * 3) % len(TOPICS)]}也要留心。" * (
            1 + (number % 10) ** 2 // 8
        )
        lines.append({"_id": f"d{number}", "title": topic, "text": text, "metadata": {"half": "ab"[number % 2]}})
    (root / "corpus.jsonl").write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    collection = Collection(root / "collection")
    options = BuildOptions(passage_tokens=40, overlap=8, index=request.param)
    summary = build([root / "corpus.jsonl"], encoder, collection, options)
    assert summary.counts.passages > 2 * summary.counts.documents
    return Serving.open(summary.folder, encoder)


def make_job(serving: Serving, query: str, **options: object) -> SearchJob:
    chosen = Options(**{"mode": Mode.DENSE, "top_k": 10} | options)  # type: ignore[arg-type]
    (tokens,) = serving.encoder.tokenize([query], Side.QUERY)
    return SearchJob(query, chosen, None if chosen.mode is Mode.LEXICAL else tokens)


def engine(threads: int = 0) -> InProcessEngine:
    return InProcessEngine(searched_by(Cpu(threads=threads)))


def run(serving: Serving, batch: list[Job], threads: int = 0) -> list[Found]:
    return [outcome.found for outcome in engine(threads).run(serving, batch)]


def dense_by_hand(serving: Serving, vector: np.ndarray, half: str | None = None) -> dict[int, float]:
    """Computes the best score of every document from all vectors of the snapshot; later passages count less."""
    best: dict[int, float] = {}
    scores = serving.snapshot.vectors.values.astype(np.float32) @ vector
    for row, document in enumerate(serving.snapshot.passages.documents.tolist()):
        if half is None or serving.snapshot.documents.get(document).metadata["half"] == half:
            later = min(float(scores[row]), LATER_DENSE * float(scores[row]))
            best[document] = max(best[document], later) if document in best else float(scores[row])
    return best


def ranked(best: dict[int, float]) -> list[int]:
    return sorted(best, key=lambda document: (-best[document], document))


@pytest.mark.parametrize("top_k", [1, 5, 40])
@pytest.mark.parametrize("half", [None, "a"])
def test_dense_ranks_documents_by_their_best_passage(serving: Serving, top_k: int, half: str | None) -> None:
    filters = () if half is None else (Equal("half", half),)
    batch = [make_job(serving, query, top_k=top_k, filters=filters) for query in QUERIES]
    outcomes = engine().run(serving, batch)
    vectors = serving.encoder.encode_tokens([job.tokens for job in batch if job.tokens])
    for vector, one in zip(vectors, (outcome.found for outcome in outcomes), strict=True):
        best = dense_by_hand(serving, vector, half)
        expected = sorted(best.values(), reverse=True)[:top_k]
        assert len(set(one.documents.tolist())) == len(one.documents) == len(expected)
        np.testing.assert_allclose(one.scores, expected, atol=1e-5)
        np.testing.assert_allclose([best[document] for document in one.documents.tolist()], one.scores, atol=1e-5)
        owners = serving.snapshot.passages.documents[one.passages]
        assert owners.tolist() == one.documents.tolist()
    assert outcomes[0].times.encode_seconds > 0
    assert outcomes[0].times.search_seconds > 0


@pytest.mark.parametrize("top_k", [1, 10, 40])
def test_lexical_ranks_documents_by_their_best_passage(serving: Serving, top_k: int) -> None:
    everything = len(serving.snapshot.passages)
    for query in QUERIES:
        rows, scores = serving.snapshot.lexical.search(query, everything)
        best: dict[int, float] = {}
        documents = serving.snapshot.passages.documents
        for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
            document = int(documents[row])
            is_later = row > 0 and documents[row - 1] == document
            best[document] = max(best.get(document, 0.0), score * (LATER_LEXICAL if is_later else 1))
        (found,) = run(serving, [make_job(serving, query, mode=Mode.LEXICAL, top_k=top_k)])
        np.testing.assert_allclose(found.scores, sorted(best.values(), reverse=True)[:top_k], rtol=1e-6)
        np.testing.assert_allclose([best[document] for document in found.documents.tolist()], found.scores, rtol=1e-6)


@pytest.mark.parametrize("fusion", list(Fusion))
def test_hybrid_fuses_documents_not_passages(serving: Serving, fusion: Fusion) -> None:
    for query in QUERIES:
        hybrid = make_job(serving, query, mode=Mode.HYBRID, fusion=fusion, weight=0.4)
        (found,) = run(serving, [hybrid])
        sides = []
        for mode in (Mode.DENSE, Mode.LEXICAL):
            (side,) = run(serving, [make_job(serving, query, mode=mode, top_k=100)])
            sides.append((side.documents, side.scores))
        documents, scores = fuse(sides[0], sides[1], fusion, 0.4)
        assert found.documents.tolist() == documents[:10].tolist()
        np.testing.assert_allclose(found.scores, scores[:10], atol=1e-6)
        assert serving.snapshot.passages.documents[found.passages].tolist() == found.documents.tolist()


def test_a_mixed_batch_answers_each_query_in_its_own_mode(serving: Serving) -> None:
    batch = [
        make_job(serving, QUERIES[0], mode=Mode.LEXICAL, top_k=3),
        make_job(serving, QUERIES[1], mode=Mode.DENSE, top_k=7),
        make_job(serving, QUERIES[2], mode=Mode.HYBRID, top_k=2, filters=(Equal("half", "b"),)),
        make_job(serving, QUERIES[3], mode=Mode.DENSE, top_k=1, filters=(Equal("half", "b"),)),
        make_job(serving, QUERIES[4], mode=Mode.DENSE, filters=(Equal("half", "neither"),)),
    ]
    found = run(serving, batch, threads=1)
    assert [len(one.documents) for one in found] == [3, 7, 2, 1, 0]
    for one in found[2:4]:
        for document in one.documents.tolist():
            assert serving.snapshot.documents.get(document).metadata["half"] == "b"


def test_a_lexical_batch_does_not_run_the_encoder(serving: Serving) -> None:
    blind = Serving(serving.snapshot, None, serving.facets, serving.select, serving.overlay)  # type: ignore[arg-type]
    found = run(blind, [make_job(serving, QUERIES[0], mode=Mode.LEXICAL)])
    assert len(found[0].documents)


def test_a_text_to_encode_gets_its_embedding_and_no_ranking(serving: Serving) -> None:
    texts = [EncodeJob(text, side, *serving.encoder.tokenize([text], side)) for text in QUERIES for side in Side]
    searched = make_job(serving, QUERIES[0])
    *encoded, ranked_one = engine().run(serving, [*texts, searched])
    for job, outcome in zip(texts, encoded, strict=True):
        assert outcome.vector is not None
        np.testing.assert_allclose(outcome.vector, serving.encoder.encode([job.text], job.side)[0], atol=0.02)
        assert not len(outcome.found.documents)
    assert len(ranked_one.found.documents)
    assert ranked_one.vector is None


@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.HYBRID])
def test_a_given_embedding_ranks_like_the_tokens_that_gave_it(serving: Serving, mode: Mode) -> None:
    for query in QUERIES:
        asked = replace(make_job(serving, query, mode=mode), keep_vector=True)
        (first,) = engine().run(serving, [asked])
        assert first.vector is not None
        ready = SearchJob(query, asked.options, vector=first.vector.tobytes())
        (again,) = run(serving, [ready])
        assert again.documents.tolist() == first.found.documents.tolist()
        np.testing.assert_allclose(again.scores, first.found.scores, atol=1e-6)


def test_a_given_embedding_may_be_of_another_text_than_the_query(serving: Serving) -> None:
    other = serving.encoder.encode([QUERIES[1]], Side.QUERY)[0]
    options = Options(Mode.DENSE, 5)
    (found,) = run(serving, [SearchJob(QUERIES[0], options, vector=other.tobytes())])
    (expected,) = run(serving, [make_job(serving, QUERIES[1], top_k=5)])
    assert found.documents.tolist() == expected.documents.tolist()


def test_a_job_with_neither_tokens_nor_embedding_is_refused(serving: Serving) -> None:
    with pytest.raises(ValueError, match="neither"):
        run(serving, [SearchJob("骨折", Options(Mode.DENSE, 5))])

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from models.encoder.pairs import PairTokenizer, RerankerSpec
from models.encoder.tokenizer import Tokens
from models.evaluation import systems
from models.evaluation.cache import VectorCache
from models.evaluation.readers import EncoderReader
from models.evaluation.sets import Kind, RerankSet, RetrievalSet, plain_task
from models.evaluation.systems import Dense, Hybrid, Lexical, NotApplicable, Reranked, top
from models.fusion import Fusion, fuse
from tests.support.evaluation import PETS, RERANK, RETRIEVAL, STS, TableEncoder
from tests.support.tiny_models import tiny_tokenizer


def dense_of(encoder: TableEncoder, folder: Path) -> Dense:
    return Dense(EncoderReader(encoder.opened(), VectorCache(folder / "vectors", 2)))


def rows_of(answers: object) -> list[list[int]]:
    assert isinstance(answers, list)
    return [rows.tolist() for rows, _ in answers]


def test_dense_answers_are_ordered_by_the_cosine(tmp_path: Path) -> None:
    dense = dense_of(TableEncoder(), tmp_path)
    assert rows_of(dense.answer(RETRIEVAL)) == [[0, 1], [1, 0]]
    assert rows_of(dense.answer(RERANK)) == [[1, 0], [0, 1]]
    cosines = dense.answer(STS)
    assert isinstance(cosines, np.ndarray)
    assert cosines.tolist() == pytest.approx([1, 0.8, 0.6])


def test_blocks_of_queries_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "QUERIES_AT_ONCE", 2)
    queries = ["猫", "狗", "小猫", "小狗", "狗"]
    ids = [str(place) for place in range(5)]
    data = RetrievalSet("five", PETS.document_ids, PETS.documents, ids, queries, {id: {"d1": 1} for id in ids})
    answers = dense_of(TableEncoder(), tmp_path).answer(plain_task("zoo", data, Kind.RETRIEVAL))
    assert rows_of(answers) == [[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]]


def test_a_single_online_query_finds_what_a_batch_finds_and_uses_no_cache(tmp_path: Path) -> None:
    encoder = TableEncoder()
    dense = dense_of(encoder, tmp_path)
    rankings = rows_of(dense.answer(RETRIEVAL))
    before = len(encoder.asked)
    lexical = Lexical(tmp_path / "bm25")
    for system in (dense, Hybrid(dense, lexical, Fusion.RECIPROCAL, None)):
        online = system.online(RETRIEVAL, PETS)
        assert [online(query)[0].tolist() for query in PETS.queries] == rankings
    assert encoder.asked[before:] == PETS.queries * 2
    assert [lexical.online(RETRIEVAL, PETS)(query)[0].tolist() for query in PETS.queries] == [[0], [1]]


def test_bm25_finds_documents_that_share_a_term(tmp_path: Path) -> None:
    assert rows_of(Lexical(tmp_path).answer(RETRIEVAL)) == [[0], [1]]


def test_bm25_rankings_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Lexical(tmp_path).answer(RETRIEVAL)
    with monkeypatch.context() as patch:
        patch.setattr(systems.LexicalIndex, "build", lambda texts: pytest.fail("built again"))
        after = Lexical(tmp_path).answer(RETRIEVAL)
    assert rows_of(after) == rows_of(before)
    assert [scores.tolist() for _, scores in after] == [scores.tolist() for _, scores in before]
    other = RetrievalSet("other", ["d1"], ["小狗"], ["q1"], ["小狗"], {"q1": {"d1": 1}})
    assert rows_of(Lexical(tmp_path).answer(plain_task("zoo", other, Kind.RETRIEVAL))) == [[0]]


def test_bm25_ranks_each_list_of_candidates_separately(tmp_path: Path) -> None:
    lists = RerankSet(
        "r", ["高血压", "感冒"], [[("流感", 0), ("高血压病", 1)], [("高血压", 0), ("感冒药", 1), ("x", 0)]]
    )
    assert rows_of(Lexical(tmp_path).answer(plain_task("zoo", lists, Kind.RERANK))) == [[1], [1]]


def test_bm25_and_hybrids_do_not_compare_sentences(tmp_path: Path) -> None:
    lexical = Lexical(tmp_path)
    for system in (lexical, Hybrid(dense_of(TableEncoder(), tmp_path), lexical, Fusion.SCORES, None)):
        with pytest.raises(NotApplicable, match="two sentences"):
            system.answer(STS)


@pytest.mark.parametrize(("fusion", "weight"), [(Fusion.SCORES, 0.3), (Fusion.SCORES, None), (Fusion.RECIPROCAL, None)])
def test_a_hybrid_fuses_the_rankings_of_its_parts(tmp_path: Path, fusion: Fusion, weight: float | None) -> None:
    encoder = TableEncoder()
    dense, lexical = dense_of(encoder, tmp_path), Lexical(tmp_path / "bm25")
    found = Hybrid(dense, lexical, fusion, weight).answer(RETRIEVAL)
    answers = dense.answer(RETRIEVAL)
    assert isinstance(answers, list)
    expected = [fuse(*pair, fusion, weight) for pair in zip(answers, lexical.answer(RETRIEVAL), strict=True)]
    assert rows_of(found) == rows_of(expected)
    assert len(encoder.asked) == 4


def test_hybrids_have_distinct_names(tmp_path: Path) -> None:
    dense, lexical = dense_of(TableEncoder(), tmp_path), Lexical(tmp_path)
    ways = [(Fusion.SCORES, None), (Fusion.SCORES, 0.3), (Fusion.RECIPROCAL, None)]
    names = [Hybrid(dense, lexical, *way).facts.name for way in ways]
    assert names == ["hybrid table", "hybrid table 0.3", "hybrid table reciprocal"]


def test_top_breaks_ties_by_row() -> None:
    rows, scores = top(np.array([0.5, 0.9, 0.5, 0.9], dtype=np.float32), 3)
    assert rows.tolist() == [1, 3, 0]
    assert scores.tolist() == [np.float32(0.9), np.float32(0.9), 0.5]


def test_top_takes_the_first_of_many_that_tie_at_the_end() -> None:
    scores = np.zeros(5000, dtype=np.float32)
    scores[4321] = 1
    assert top(scores, 100)[0].tolist() == [4321, *range(99)]
    assert top(scores[:3], 100)[0].tolist() == [0, 1, 2]


class ByLength:
    """A reranker that scores short documents highest, whatever the query."""

    tokenizer = PairTokenizer(tiny_tokenizer().to_str(), RerankerSpec(architecture="bert", max_length=16, separators=1))

    def score(self, pairs: Sequence[Tokens]) -> np.ndarray:
        return np.array([-len(pair) for pair in pairs], np.float32)


def test_a_reranker_orders_the_first_documents_of_another_system(tmp_path: Path) -> None:
    documents = ["高血压用药", "痛", "发烧", "感冒流感"]
    data = RetrievalSet("four", list("abcd"), documents, ["q"], ["头"], {"q": {"a": 1}})
    task = plain_task("zoo", data, Kind.RETRIEVAL)
    first = dense_of(TableEncoder(), tmp_path)
    first.answer = lambda task: [(np.array([0, 3, 1, 2]), np.array([0.9, 0.8, 0.7, 0.6], np.float32))]  # type: ignore[method-assign]
    first.online = lambda task, data: lambda query: first.answer(task)[0]  # type: ignore[method-assign,assignment]
    reranked = Reranked(first, ByLength(), "short", depth=3)
    ((rows, scores),) = reranked.answer(task)
    assert rows.tolist() == [1, 3, 0, 2]
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    assert reranked.facts.name == "table, short 3"
    assert reranked.online(task, data)("头")[0].tolist() == rows.tolist()
    with pytest.raises(NotApplicable, match="hits of a search"):
        reranked.answer(STS)

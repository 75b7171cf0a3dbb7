from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.evaluation.cache import VectorCache
from models.evaluation.judge import TIMED_QUERIES, WARM_UP_QUERIES, judge, judge_one, queries_per_second
from models.evaluation.readers import EncoderReader
from models.evaluation.results import GOLD_SCORE, SIMILARITY, Hit, SetResult, SystemFacts
from models.evaluation.sets import Kind, RetrievalSet, Task, plain_task
from models.evaluation.systems import Dense, Lexical
from models.lexical import Ranking
from tests.support.evaluation import PETS, RERANK, RETRIEVAL, STS, TASKS, TableEncoder


@pytest.fixture
def dense(tmp_path: Path) -> Dense:
    return Dense(EncoderReader(TableEncoder().opened(), VectorCache(tmp_path / "vectors", 2)))


class Fixed:
    """A system that answers every task with the same rankings."""

    facts = SystemFacts("fixed", "lexical")

    def __init__(self, *rankings: list[int]) -> None:
        self._rankings = rankings

    def answer(self, task: Task) -> list[Ranking]:
        return [(np.array(rows, dtype=np.int64), np.zeros(len(rows), dtype=np.float32)) for rows in self._rankings]

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        return lambda query: self.answer(task)[0]


def test_retrieval_is_judged_query_by_query(dense: Dense) -> None:
    result = judge_one(RETRIEVAL, dense)
    half = 1 / np.log2(3)
    assert result.metrics["nDCG@10"] == pytest.approx(100 * (1 + half) / 2)
    assert result.metrics["Acc@1"] == 50
    assert result.metrics["MRR@10"] == 75
    assert (result.benchmark, result.set_name, result.kind, result.system) == ("zoo", "pets", Kind.RETRIEVAL, "table")
    assert result.value == result.metrics["nDCG@10"]
    assert result.queries_per_second is None
    queries, documents = dense.embeddings(RETRIEVAL, PETS)
    assert [query.metrics["positive cosine"] for query in result.queries] == pytest.approx(
        [sum(a * b for a, b in zip(query, documents[0], strict=True)) for query in queries.tolist()]
    ), "document d1 answers both"
    assert result.metrics["positive cosine"] == pytest.approx(70)
    first, second = result.queries
    assert (first.id, first.text, first.metrics["nDCG@10"]) == ("q1", "小猫", 1)
    assert second.metrics["nDCG@10"] == pytest.approx(half)
    assert second.hits == [Hit("d2", "狗", 0), Hit("d1", "猫", 1)]
    assert second.gold == [Hit("d1", "猫", 1)]


def test_entity_linking_has_its_own_metrics(dense: Dense) -> None:
    result = judge_one(plain_task("zoo", PETS, Kind.LINKING), dense)
    assert result.metrics == {"MRR@5": 75, "Recall@1": 50, "Recall@5": 100}
    assert result.main_metric == "MRR@5"


def test_reranking_counts_from_the_sets_lowest_relevant_grade(dense: Dense) -> None:
    result = judge_one(RERANK, dense)
    assert [query.metrics["MAP@10"] for query in result.queries] == [0.5, 1]
    assert result.value == 75
    assert result.queries[1].hits == [Hit("1", "狗", 2), Hit("2", "猫", 1)]
    assert [query.id for query in result.queries] == ["1", "2"]
    assert judge_one(replace(RERANK, data=replace(RERANK.data, relevant=1)), dense).value == 75


def test_sentence_pairs_keep_gold_score_and_similarity(dense: Dense) -> None:
    result = judge_one(STS, dense)
    assert result.metrics == pytest.approx({"Pearson": 100, "Spearman": 100})
    assert result.queries[1].text == "猫\n小猫"
    assert result.queries[1].metrics == pytest.approx({SIMILARITY: 0.8, GOLD_SCORE: 0.8})


def test_a_query_that_finds_nothing_scores_nothing() -> None:
    result = judge_one(RETRIEVAL, Fixed([], [0]))
    assert [query.metrics["MRR@10"] for query in result.queries] == [0, 1]
    assert result.queries[0].hits == []
    assert result.queries[0].gold == [Hit("d1", "猫", 1)]


def test_every_task_is_judged_by_every_system_and_gaps_are_explained(dense: Dense, tmp_path: Path) -> None:
    reported: list[list[str]] = []

    def report(results: list[SetResult]) -> None:
        reported.append([f"{result.set_name} {result.system}" for result in results])

    judgement = judge(TASKS, [Lexical(tmp_path), dense], report)  # type: ignore[arg-type]
    assert reported == [["pets BM25", "pets table"], ["lists BM25", "lists table"], ["pairs table"]]
    assert [f"{result.set_name} {result.system}" for result in judgement.results] == [
        name for of_set in reported for name in of_set
    ]
    ((system, reasons),) = judgement.not_applicable.items()
    ((reason, sets),) = reasons.items()
    assert (system, sets) == ("BM25", ["pairs"])
    assert "two sentences" in reason


def test_speed_is_measured_on_request_for_retrieval_only(dense: Dense) -> None:
    measured = {result.set_name: result.queries_per_second for result in judge(TASKS, [dense], speed=True).results}
    assert measured["pets"] is not None
    assert measured["pets"] > 0
    assert measured["lists"] is None
    assert measured["pairs"] is None


@pytest.mark.parametrize("count", [1, TIMED_QUERIES, 10 * TIMED_QUERIES + 7])
def test_speed_is_measured_on_a_bounded_sample_of_the_whole_set(count: int) -> None:
    asked: list[str] = []
    queries_per_second(asked.append, [str(number) for number in range(count)])
    timed = asked[min(count, WARM_UP_QUERIES) :]
    assert len(timed) == min(count, TIMED_QUERIES)
    assert len(set(timed)) == len(timed)
    assert int(timed[-1]) >= 0.9 * (count - 1)

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.evaluation.judge import Figure, judge_all, judge_pairs, judge_rerank, judge_retrieval, table
from models.evaluation.sets import PairSet, RerankSet, RetrievalSet
from models.evaluation.systems import Dense, Hybrid, Lexical, top
from models.fusion import Fusion
from models.spec import Side

VECTORS = {"猫": (1.0, 0.0), "狗": (0.0, 1.0), "小猫": (0.8, 0.6), "小狗": (0.6, 0.8)}


class TableEncoder:
    """Known vectors of known texts; counts how many texts it was asked for."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, texts: Sequence[str], side: Side) -> NDArray[np.float32]:
        self.encoded += len(texts)
        return np.array([VECTORS[text] for text in texts], dtype=np.float32)


SET = RetrievalSet(
    "pets", ["d1", "d2"], ["猫", "狗"], ["q1", "q2"], ["小猫", "小狗"], {"q1": {"d1": 1}, "q2": {"d1": 1}}
)


def test_dense_retrieval_is_judged_by_the_cosine() -> None:
    assert judge_retrieval(SET, Dense(TableEncoder())) == 100 * (1 + 1 / np.log2(3)) / 2


def test_the_hybrid_costs_no_second_encoding() -> None:
    encoder = TableEncoder()
    dense, lexical = Dense(encoder), Lexical()
    judge_retrieval(SET, dense)
    judge_retrieval(SET, Hybrid(dense, lexical, Fusion.SCORES, 0.5))
    assert encoder.encoded == 4


def test_reranking_and_pairs() -> None:
    lists = RerankSet("r", ["小猫"], [[("狗", 2), ("猫", 0)]])
    assert judge_rerank(lists, TableEncoder()) == 50
    pairs = PairSet("p", [("猫", "猫"), ("猫", "小猫"), ("猫", "小狗")], [1.0, 0.8, 0.6])
    assert round(judge_pairs(pairs, TableEncoder()), 3) == 100


def test_top_breaks_ties_by_row() -> None:
    rows, scores = top(np.array([0.5, 0.9, 0.5, 0.9], dtype=np.float32), 3)
    assert rows.tolist() == [1, 3, 0]
    assert scores.tolist() == [np.float32(0.9), np.float32(0.9), 0.5]


def test_the_table_has_a_row_a_set_and_a_column_a_system() -> None:
    text = table(
        [Figure("s1", "nDCG@10", "A", 50.0), Figure("s1", "nDCG@10", "B", 60.0), Figure("s2", "MAP@10", "B", 1.0)]
    )
    assert text.splitlines()[0] == "| set | metric | A | B |"
    assert text.splitlines()[2:] == ["| s1 | nDCG@10 | 50.00 | 60.00 |", "| s2 | MAP@10 |  | 1.00 |"]


def test_every_set_below_a_folder_is_judged(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets" / "corpus.jsonl").write_text('{"_id": "d1", "text": "猫"}\n{"_id": "d2", "text": "狗"}\n')
    (tmp_path / "pets" / "queries.jsonl").write_text('{"_id": "q1", "text": "小猫"}\n')
    (tmp_path / "pets" / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    seen: list[Figure] = []
    encoder = TableEncoder()
    figures = judge_all(tmp_path, {"dense": Dense(encoder), "BM25": Lexical()}, {"dense": encoder}, seen.append)
    assert figures == seen == [Figure("pets", "nDCG@10", "dense", 100.0), Figure("pets", "nDCG@10", "BM25", 100.0)]

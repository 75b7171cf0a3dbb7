from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokenizer
from models.errors import BadData
from models.rows import Pair
from models.training.passes import TokenTable, chunks_of
from models.training.tables import PairTable, Ragged
from models.training.texts import Strings, Texts
from tests.support.tiny_models import tiny_spec
from tests.support.toy_training import ONE

BUNDLED = Path("models/pretrained/care-small-zh/tokenizer.json")
TEXTS = ["感冒", "高血压的治疗", "药"]
SPEC = tiny_spec("bert").model_copy(update={"query_instruction": "问：", "document_instruction": "文："})


def table(texts: Texts) -> tuple[TokenTable, Tokenizer]:
    tokenizer = Tokenizer.load(BUNDLED, 16)
    return TokenTable.build(texts, SPEC, tokenizer, ONE), tokenizer


def test_gathered_rows_equal_the_output_of_the_tokenizer() -> None:
    tokens, tokenizer = table(Texts(Side.DOCUMENT, TEXTS))
    ids, mask = tokens.padded(np.array([2, 1]))
    expected = [tokenizer(f"文：{TEXTS[row]}").ids for row in (2, 1)]
    assert [row[: int(m.sum())].tolist() for row, m in zip(ids, mask, strict=True)] == expected
    assert int(ids[0, len(expected[0]) :].sum()) == 0
    assert tokens.flat(np.array([2, 1])).tolist() == expected[0] + expected[1]


def test_an_instruction_of_the_row_comes_before_the_encoders_own() -> None:
    tokens, tokenizer = table(Texts(Side.QUERY, ["感冒", "感冒"], [None, "找："]))
    for row, prefix in enumerate(("问：", "找：\nQuery: ")):
        ids, _ = tokens.padded(np.array([row]))
        assert ids[0].tolist() == tokenizer(f"{prefix}感冒").ids


def test_equal_texts_are_one_row() -> None:
    pairs = PairTable.of_pairs(
        [
            Pair("a", ["同"], ["异"], "x"),
            Pair("b", ["同", "新"], [], "x", hypothetical=["想"]),
            Pair("a", ["新"], [], "y"),
        ]
    )
    assert pairs.query.tolist() == [0, 1, 0]
    assert list(pairs.documents.texts) == ["同", "异", "新", "想"]
    assert [pairs.positives[row].tolist() for row in range(3)] == [[0], [0, 2], [2]]
    assert pairs.negatives[0].tolist() == [1]
    assert pairs.hypothetical[1].tolist() == [3]
    assert {name: rows.tolist() for name, rows in pairs.sources.items()} == {"x": [0, 1], "y": [2]}


def test_the_answers_of_a_query_come_from_all_pairs() -> None:
    pairs = [Pair("q", ["b", "a"], [], "s"), Pair("r", ["c"], ["a"], "s"), Pair("q", ["a", "c"], [], "t")]
    table = PairTable.of_pairs(pairs)
    found = [{table.documents.texts[row] for row in table.answers[query]} for query in range(2)]
    assert found == [{"a", "b", "c"}, {"c"}]


def test_the_answers_of_a_query_do_not_depend_on_its_instruction() -> None:
    pairs = [Pair("q", ["a"], [], "s", "one"), Pair("r", ["c"], [], "s"), Pair("q", ["b"], ["a"], "s", "two")]
    table = PairTable.of_pairs(pairs)
    assert [(table.queries.texts[row], table.answers[row].tolist()) for row in range(3)] == [
        ("q", [0, 2]),
        ("r", [1]),
        ("q", [0, 2]),
    ]


def test_missing_sources_are_named() -> None:
    table = PairTable.of_pairs([Pair("q", ["d"], [], "s")])
    table.check_sources("data.weights", ["s"])
    with pytest.raises(BadData, match=r"data.weights: no row is of 't'; the files have s"):
        table.check_sources("data.weights", ["s", "t"])


def test_a_text_is_its_own_document() -> None:
    pairs = PairTable.of_texts([("甲", "x"), ("乙", "y"), ("甲", "y")])
    assert list(pairs.queries.texts) == list(pairs.documents.texts) == ["甲", "乙"]
    assert [pairs.positives[row].tolist() for row in range(2)] == [[0], [1]]
    assert {name: rows.tolist() for name, rows in pairs.sources.items()} == {"x": [0], "y": [1]}


PAIRS = [
    Pair("问", ["同"], ["异", "同"], "x", instruction="找"),
    Pair("问", ["新"], [], "x"),
    Pair("b", ["同", "新"], ["\ud800"], "y", hypothetical=["想"]),
]


def as_lists(table: PairTable) -> object:
    """Returns the content of a table as plain values."""
    instructions = table.queries.instructions
    return (
        list(table.queries.texts),
        None if instructions is None else list(instructions),
        list(table.documents.texts),
        table.query.tolist(),
        *([part[row].tolist() for row in range(len(table))] for part in (table.positives, table.negatives)),
        *({name: rows.tolist() for name, rows in groups.items()} for groups in (table.sources, table.corpus)),
        [table.answers[row].tolist() for row in range(len(table.queries))],
    )


def test_a_table_on_disk_equals_the_one_in_memory_and_is_memory_mapped(tmp_path: Path) -> None:
    corpus = [("更多", "y"), ("同", "z"), ("更多", "y")]
    PairTable.of_pairs(PAIRS, corpus, tmp_path).save(tmp_path)
    mapped = PairTable.load(tmp_path)
    assert as_lists(mapped) == as_lists(PairTable.of_pairs(PAIRS, corpus))
    assert {name: [mapped.documents.texts[row] for row in rows] for name, rows in mapped.corpus.items()} == {
        "y": ["更多"],
        "z": ["同"],
    }
    assert list(mapped.queries.instructions or ()) == ["找", None, None]
    held = [mapped.query, mapped.positives.values, mapped.answers.starts, mapped.sources["x"]]
    texts = mapped.documents.texts
    assert isinstance(texts, Strings)
    assert all(isinstance(array, np.memmap) for array in (*held, texts.buffer, texts.starts)), "memory-mapped"


def test_texts_on_disk_equal_those_in_memory(tmp_path: Path) -> None:
    texts = [("甲", "x"), ("乙", "y"), ("甲", "y"), ("", "y")]
    PairTable.of_texts(texts, tmp_path).save(tmp_path)
    assert as_lists(PairTable.load(tmp_path)) == as_lists(PairTable.of_texts(texts))


def test_token_ids_on_disk_equal_those_in_memory_and_are_memory_mapped(tmp_path: Path) -> None:
    texts, tokenizer = Texts(Side.DOCUMENT, TEXTS), Tokenizer.load(BUNDLED, 16)
    plain = TokenTable.build(texts, SPEC, tokenizer, ONE)
    mapped = TokenTable.build(texts, SPEC, tokenizer, ONE, tmp_path / "t")
    rows = np.array([2, 0, 1])
    for ours, theirs in zip(mapped.padded(rows), plain.padded(rows), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert mapped.flat(rows).tolist() == plain.flat(rows).tolist()
    assert all(isinstance(array, np.memmap) for array in (mapped.ids, mapped.starts, mapped.lengths))


def test_a_table_limited_to_some_pairs_has_only_their_texts(tmp_path: Path) -> None:
    whole = PairTable.of_pairs(PAIRS)
    some = whole.limited_to(np.array([1]))
    assert (list(some.queries.texts), list(some.documents.texts), len(some)) == (["问"], ["新"], 3)
    assert some.documents.texts[int(some.positives[1][0])] == "新"
    both = whole.limited_to(np.array([0, 2]))
    assert [both.queries.texts[int(both.query[pair])] for pair in (0, 2)] == ["问", "b"]
    assert [both.documents.texts[row] for row in both.hypothetical[2]] == ["想"]
    assert [both.documents.texts[row] for row in both.answers[0]] == ["同", "新"], "of 问 with any instruction"


@given(st.lists(st.text(max_size=3), min_size=1, max_size=30))
def test_equal_texts_are_one_row_numbered_by_first_occurrence(texts: list[str]) -> None:
    table = PairTable.of_pairs([Pair("q", [text], [], "s") for text in texts])
    unique = list(dict.fromkeys(texts))
    assert list(table.documents.texts) == unique
    assert table.positives.values.tolist() == [unique.index(text) for text in texts]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8), st.data())
def test_a_gather_concatenates_the_lists(lists: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=5))
    owners, values = Ragged.of(lists).gather(np.array(rows))
    assert values.tolist() == [value for row in rows for value in lists[row]]
    assert owners.tolist() == [at for at, row in enumerate(rows) for _ in lists[row]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 200))
def test_chunks_have_every_text_once_within_the_budget(lengths: list[int], budget: int) -> None:
    chunks = chunks_of(np.array(lengths), budget)
    assert sorted(np.concatenate(chunks).tolist()) == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk) == 1 or len(chunk) * max(lengths[row] for row in chunk) <= budget

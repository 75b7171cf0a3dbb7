from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.errors import BadData
from models.rows import Pair
from models.training.batches import BatchDealer, apportion, split, steps_of
from models.training.tables import PairTable

CPU = torch.device("cpu")


def a_table() -> PairTable:
    negatives = [[f"n{row}"] if row % 2 else [] for row in range(60)]
    return PairTable.of_pairs(
        Pair(f"q{row}", [f"d{row}"], negatives[row], "a" if row < 40 else "b") for row in range(60)
    )


def dealer(seed: int = 0, size: int = 8, steps: int = 60, weights: dict[str, float] | None = None) -> BatchDealer:
    table = a_table()
    vectors = np.random.default_rng(1).standard_normal((len(table.documents), 3)).astype(np.float32)
    return BatchDealer(table, weights or {}, size=size, steps=steps, negatives=1, seed=seed, leaf=4, embeddings=vectors)


def test_a_batch_depends_only_on_seed_and_step() -> None:
    first, second = dealer(), dealer()
    second.deal(7)
    for step in (0, 3, 59, 1):
        ours, theirs = first.deal(step), second.deal(step)
        assert ours.source == theirs.source
        np.testing.assert_array_equal(ours.queries, theirs.queries)
        np.testing.assert_array_equal(ours.documents, theirs.documents)
    assert dealer(seed=1).deal(0).queries.tolist() != first.deal(0).queries.tolist()


def test_an_epoch_has_every_pair_once_and_each_batch_one_source() -> None:
    steps = steps_of(np.array([40, 20]), 5, 3, None, None)
    own = dealer(size=5, steps=steps)
    batches = [own.deal(step) for step in range(steps)]
    assert Counter(row for batch in batches for row in batch.queries.tolist()) == dict.fromkeys(range(60), 3)
    for batch in batches:
        assert set(batch.queries.tolist()) <= set(range(40) if batch.source == "a" else range(40, 60))


@pytest.mark.parametrize(("sizes", "steps"), [([5] * 20, 20), ([1000, 11, 11, 3], 105)])
def test_an_epoch_leaves_no_source_out(sizes: list[int], steps: int) -> None:
    table = PairTable.of_pairs(
        Pair(f"{source} {row}", ["d"], [], f"s{source}") for source, size in enumerate(sizes) for row in range(size)
    )
    assert steps_of(np.array(sizes), 10, 1, None, None) == steps
    own = BatchDealer(table, {}, size=10, steps=steps, negatives=0, seed=0)
    assert {row for step in range(steps) for row in own.deal(step).queries.tolist()} == set(range(sum(sizes)))


def test_hard_negatives_follow_the_positives() -> None:
    table, own = a_table(), dealer()
    for step in range(20):
        batch = own.deal(step)
        texts = [table.documents.texts[row] for row in batch.documents]
        assert texts[: len(batch.queries)] == [f"d{row}" for row in batch.queries]
        assert set(texts[len(batch.queries) :]) == {f"n{row}" for row in batch.queries if row % 2}


def test_hard_negatives_of_other_queries_are_marked() -> None:
    table, own = a_table(), dealer()
    batch = own.deal(3)
    asked = [table.queries.texts[row] for row in batch.queries]
    shown = [table.documents.texts[row] for row in batch.documents]
    expected = [[text.startswith("n") and text[1:] != query[1:] for text in shown] for query in asked]
    assert batch.others(CPU).tolist() == expected
    assert any(any(row) for row in expected)


@pytest.mark.parametrize("leaf", [None, 4])
@pytest.mark.parametrize("steps", [3, 9, 40])
def test_the_drawn_texts_are_known_before_reading(leaf: int | None, steps: int) -> None:
    table = a_table()
    vectors = np.random.default_rng(1).standard_normal((len(table.documents), 3)).astype(np.float32)
    settings = {"size": 4, "steps": steps, "negatives": 1, "seed": 2, "leaf": leaf, "trial": True}
    drawn = BatchDealer(table, {"a": 2.0, "b": 1.0}, **settings).drawn()
    limited = table.limited_to(drawn)
    assert len(limited.documents) < len(table.documents) or steps == 40
    texts = list(table.documents.texts)
    places = [texts.index(text) for text in limited.documents.texts]
    own = BatchDealer(limited, {"a": 2.0, "b": 1.0}, **settings, embeddings=vectors[places])
    asked = {row for step in range(steps) for row in own.deal(step).queries.tolist()}
    assert {limited.queries.texts[row] for row in asked} == {f"q{pair}" for pair in drawn}
    whole = BatchDealer(table, {"a": 2.0, "b": 1.0}, **settings, embeddings=vectors)
    for step in range(steps):
        ours, theirs = own.deal(step), whole.deal(step)
        assert [limited.documents.texts[row] for row in ours.documents[: len(ours.queries)]] == [
            table.documents.texts[row] for row in theirs.documents[: len(theirs.queries)]
        ]


def test_leaves_of_a_whole_run_are_made_from_whole_sources() -> None:
    table = a_table()
    assert len(BatchDealer(table, {}, size=4, steps=3, negatives=0, seed=0, leaf=4).drawn()) == 60


def test_sources_are_drawn_by_weight() -> None:
    counts = Counter(dealer(weights={"a": 1.0, "b": 3.0}).deal(step).source for step in range(60))
    assert counts == {"a": 15, "b": 45}
    assert {dealer(weights={"a": 0.0}).deal(step).source for step in range(30)} == {"b"}
    with pytest.raises(BadData, match="weight 0"):
        dealer(weights={"a": 0.0, "b": 0.0})


def test_known_answers_are_marked() -> None:
    table = PairTable.of_pairs(
        [Pair("q", ["d0", "d1"], ["d2"], "s"), Pair("r", ["d1"], [], "s"), Pair("q", ["d3"], [], "s")]
    )
    batch = BatchDealer(table, {}, size=3, steps=1, negatives=1, seed=0).deal(0)
    asked = [table.queries.texts[row] for row in batch.queries]
    shown = [table.documents.texts[row] for row in batch.documents]
    known = {"q": {"d0", "d1", "d3"}, "r": {"d1"}}
    assert batch.answers(CPU).tolist() == [[document in known[query] for document in shown] for query in asked]


def test_answers_from_rows_outside_the_batch_are_known() -> None:
    table = PairTable.of_pairs(
        [Pair("q", ["d0"], ["d2"], "s"), Pair("r", ["d1"], [], "s"), Pair("q", ["d1", "d2"], [], "elsewhere")]
    )
    batch = BatchDealer(table, {"s": 1.0, "*": 0.0}, size=2, steps=1, negatives=1, seed=0).deal(0)
    asked = [table.queries.texts[row] for row in batch.queries]
    assert batch.answers(CPU)[asked.index("q")].tolist() == [True, True, True]


def test_a_query_includes_its_hypothetical_documents() -> None:
    table = PairTable.of_pairs([Pair("q", ["d"], [], "s", hypothetical=["h1", "h2"]), Pair("r", ["e"], [], "s")])
    batch = BatchDealer(table, {}, size=2, steps=1, negatives=0, seed=0).deal(0)
    owner = [table.queries.texts[row] for row in batch.queries].index("q")
    assert batch.owners.tolist() == [owner, owner]
    assert [table.documents.texts[row] for row in batch.hypothetical] == ["h1", "h2"]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9), st.integers(0, 500))
def test_apportioned_counts_add_up_and_are_near_their_shares(weights: list[float], total: int) -> None:
    shares = np.array(weights) / sum(weights)
    counts = apportion(shares, total)
    assert counts.sum() == total
    assert np.abs(counts - shares * total).max() <= 1


@pytest.mark.parametrize(
    ("rows", "given", "weighted", "expected"),
    [
        ([100], (10, 2.0, None, None), False, 20),
        ([5], (10, 1.0, None, None), False, 1),
        ([5] * 20, (10, 1.0, None, None), True, 10),
        ([9], (2, None, 7, 3), False, 3),
    ],
)
def test_the_number_of_steps_is_computed(
    rows: list[int], given: tuple[int, float | None, int | None, int | None], weighted: bool, expected: int
) -> None:
    assert steps_of(np.array(rows), *given, weighted=weighted) == expected


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 5))
def test_leaves_have_every_row_once(rows: int, leaf: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    embeddings = generator.standard_normal((rows, 3)).astype(np.float32)
    leaves = split(np.arange(rows), embeddings, leaf, generator)
    assert sorted(np.concatenate(leaves).tolist()) == list(range(rows))
    assert max(map(len, leaves)) <= leaf


def test_neighbours_share_a_leaf() -> None:
    generator = np.random.default_rng(0)
    near = np.concatenate([np.full((32, 2), 5.0), np.full((32, 2), -5.0)]).astype(np.float32)
    near += generator.standard_normal(near.shape).astype(np.float32) * 0.01
    leaves = split(np.arange(64), near, 32, generator)
    assert all(len({int(row) // 32 for row in leaf}) == 1 for leaf in leaves)

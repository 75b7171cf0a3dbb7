import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.batches import BatchDealer, split
from models.training.data import PairTable


def dealer(seed: int = 0, size: int = 8, weights: dict[str, float] | None = None) -> BatchDealer:
    table = PairTable(
        queries=None,  # type: ignore[arg-type]
        documents=None,  # type: ignore[arg-type]
        positives=[[row] for row in range(60)],
        negatives=[[row + 100] if row % 2 else [] for row in range(60)],
        sources={"a": np.arange(40), "b": np.arange(40, 60)},
    )
    angles = np.linspace(0, np.pi, 60, dtype=np.float32)
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return BatchDealer(
        table, weights or {}, default_weight=1.0, size=size, leaf=4, hard_negatives=1, seed=seed, embeddings=embeddings
    )


def test_a_batch_depends_on_nothing_but_seed_and_step() -> None:
    first, second = dealer(), dealer()
    second.deal(7)
    for step in (0, 3, 250):
        ours, theirs = first.deal(step), second.deal(step)
        assert ours.source == theirs.source
        np.testing.assert_array_equal(ours.pairs, theirs.pairs)
        np.testing.assert_array_equal(ours.negatives, theirs.negatives)
    assert dealer(seed=1).deal(0).pairs.tolist() != first.deal(0).pairs.tolist()


def test_a_batch_is_of_one_source_without_repeats() -> None:
    for step in range(50):
        drawn = dealer().deal(step)
        assert len(set(drawn.pairs.tolist())) == len(drawn.pairs) <= 8
        assert set(drawn.pairs.tolist()) <= set(range(40) if drawn.source == "a" else range(40, 60))
        assert set(drawn.negatives.tolist()) == {row + 100 for row in drawn.pairs.tolist() if row % 2}


def test_sources_are_drawn_by_weight() -> None:
    own = dealer(weights={"a": 0.0})
    assert {own.deal(step).source for step in range(30)} == {"b"}
    with pytest.raises(ValueError, match="weight 0"):
        dealer(weights={"a": 0.0, "b": 0.0})


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 5))
def test_leaves_hold_every_row_once(rows: int, leaf: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    embeddings = generator.standard_normal((rows, 3)).astype(np.float32)
    leaves = split(np.arange(rows), embeddings, leaf, generator)
    assert sorted(np.concatenate(leaves).tolist()) == list(range(rows))
    assert max(map(len, leaves)) <= leaf


def test_neighbours_share_a_leaf_more_often_than_strangers() -> None:
    generator = np.random.default_rng(0)
    near = np.concatenate([np.full((32, 2), 5.0), np.full((32, 2), -5.0)]).astype(np.float32)
    near += generator.standard_normal(near.shape).astype(np.float32) * 0.01
    leaves = split(np.arange(64), near, 32, generator)
    assert all(len({int(row) // 32 for row in leaf}) == 1 for leaf in leaves)

"""Two-priority queue: limits, servings, and bulk work that fills batches without delaying online work."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from service.engine.batches import LEAST_SLICE, LEAST_SLICE_TOKENS, MOST_PASSES, Lanes


@dataclass(frozen=True)
class Piece:
    """One piece of work."""

    name: str
    size: int = 1
    length: int = 1
    serving: object = "one"
    wanted_until: float = 100.0

    def is_wanted(self, now: float) -> bool:
        return now < self.wanted_until


def names(batch: list[Piece]) -> list[str]:
    return [piece.name for piece in batch]


def pieces(prefix: str, count: int, **facts: object) -> list[Piece]:
    return [Piece(f"{prefix}{number}", **facts) for number in range(count)]  # type: ignore[arg-type]


def test_bulk_work_fills_the_rest_of_a_slice_after_online_work() -> None:
    lanes: Lanes[Piece] = Lanes(8, 1000)
    lanes.add(pieces("b", 20), bulk=True)
    lanes.add(pieces("o", 2))
    assert (lanes.online_queries, lanes.bulk_queries, len(lanes)) == (2, 20, 22)
    assert names(lanes.take(0, 5)[0]) == ["o0", "o1", "b0", "b1", "b2"]
    assert names(lanes.take(0, 5)[0]) == ["b3", "b4", "b5", "b6", "b7"]
    assert (lanes.online_queries, lanes.bulk_queries) == (0, 12)


def test_online_work_takes_the_whole_batch_and_bulk_work_waits() -> None:
    lanes: Lanes[Piece] = Lanes(8, 1000)
    lanes.add(pieces("b", 4), bulk=True)
    lanes.add(pieces("o", 10))
    assert names(lanes.take(0, 5)[0]) == names(pieces("o", 8))


def test_a_slice_has_a_minimum_size_and_is_at_most_a_batch() -> None:
    for slice_queries, taken in ((0, LEAST_SLICE), (1000, 8)):
        lanes: Lanes[Piece] = Lanes(8, 1000)
        lanes.add(pieces("b", 20), bulk=True)
        assert len(lanes.take(0, slice_queries)[0]) == taken


def test_a_slice_of_long_texts_has_the_minimum_size() -> None:
    lanes: Lanes[Piece] = Lanes(8, 100_000)
    lanes.add(
        [*pieces("b", 3, length=LEAST_SLICE_TOKENS // 2), *pieces("c", 3, length=10 * LEAST_SLICE_TOKENS)], bulk=True
    )
    assert names(lanes.take(0, 0)[0]) == ["b0", "b1"]
    lanes.add(pieces("o", 1))
    assert names(lanes.take(0, 0)[0]) == ["o0"]
    assert names(lanes.take(0, 0)[0]) == ["b2"]
    assert names(lanes.take(0, 0)[0]) == ["c0"]
    assert names(lanes.take(0, 2)[0]) == ["c1", "c2"]  # a faster engine takes more


def test_bulk_work_is_not_starved_by_online_work() -> None:
    lanes: Lanes[Piece] = Lanes(4, 1000)
    lanes.add(pieces("b", 20), bulk=True)
    with_bulk = []
    for _ in range(3 * (MOST_PASSES + 1)):
        lanes.add(pieces("o", 4))
        with_bulk.append(any(name.startswith("b") for name in names(lanes.take(0, 4)[0])))
    assert with_bulk == ([False] * MOST_PASSES + [True]) * 3


def test_bulk_work_of_another_serving_is_not_starved() -> None:
    lanes: Lanes[Piece] = Lanes(4, 1000)
    lanes.add(pieces("b", 4, serving="old"), bulk=True)
    batches = []
    for _ in range(MOST_PASSES + 1):
        lanes.add(pieces("o", 1, serving="new"))
        batches.append({piece.serving for piece in lanes.take(0, 4)[0]})
    assert batches == [{"new"}] * MOST_PASSES + [{"old"}]


def test_bulk_work_can_be_excluded() -> None:
    lanes: Lanes[Piece] = Lanes(8, 1000)
    lanes.add(pieces("b", 2), bulk=True)
    assert lanes.take(0, 4, bulk=False) == ([], [])
    lanes.add(pieces("o", 1))
    assert names(lanes.take(0, 4, bulk=False)[0]) == ["o0"]
    assert names(lanes.take(0, 4)[0]) == ["b0", "b1"]


def test_pieces_of_several_queries_are_not_split() -> None:
    lanes: Lanes[Piece] = Lanes(8, 1000)
    lanes.add([Piece("a", size=5), Piece("b", size=3), Piece("c", size=4), Piece("huge", size=50), Piece("d")])
    batches = [names(lanes.take(0, 4)[0]) for _ in range(4)]
    assert batches == [["a", "b"], ["c"], ["huge"], ["d"]]


def test_abandoned_work_is_dropped_and_reported() -> None:
    lanes: Lanes[Piece] = Lanes(8, 1000)
    lanes.add([Piece("late", wanted_until=5), Piece("good")])
    lanes.add([Piece("bulk", wanted_until=5)], bulk=True)
    batch, dropped = lanes.take(6, 4)
    assert (names(batch), names(dropped)) == (["good"], ["late", "bulk"])
    assert len(lanes) == 0
    lanes.add([Piece("late", size=2, wanted_until=5), Piece("good")])
    lanes.add([Piece("bulk", wanted_until=5), Piece("more", size=3)], bulk=True)
    assert names(lanes.drop_unwanted(6)) == ["late", "bulk"]
    assert (lanes.online_queries, lanes.bulk_queries) == (1, 3)
    assert names(lanes.take(6, 4)[0]) == ["good", "more"]


work = st.builds(
    Piece,
    name=st.text("abc", min_size=1, max_size=3),
    size=st.integers(1, 6),
    length=st.integers(1, 9),
    serving=st.sampled_from(["old", "new"]),
    wanted_until=st.sampled_from([1.0, 100.0]),
)


@given(
    online=st.lists(work, max_size=20),
    bulk=st.lists(work, max_size=20),
    queries=st.integers(1, 10),
    tokens=st.integers(1, 60),
    slice_queries=st.integers(0, 12),
)
def test_every_piece_leaves_once_in_batches_within_the_limits(
    online: list[Piece], bulk: list[Piece], queries: int, tokens: int, slice_queries: int
) -> None:
    lanes: Lanes[Piece] = Lanes(queries, tokens)
    lanes.add(online)
    lanes.add(bulk, bulk=True)
    left: list[Piece] = []
    while len(lanes):
        batch, dropped = lanes.take(50, slice_queries)
        assert batch or dropped
        assert len({piece.serving for piece in batch}) <= 1
        assert not any(piece.is_wanted(50) for piece in dropped)
        size, longest = sum(p.size for p in batch), max((p.length for p in batch), default=0)
        assert len(batch) <= 1 or (size <= queries and size * longest <= tokens)
        left += batch + dropped
    assert sorted(map(id, left)) == sorted(map(id, online + bulk))

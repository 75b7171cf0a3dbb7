"""Rate limits: a bucket of calls with an even refill, in this process; Redis is tested in tests/integration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.limits import Rate, Rates
from tests.unit.service.support import Clock

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("text", "rate"), [("50/s", Rate(50, 1)), ("7/m", Rate(7, 60)), ("1/d", Rate(1, 86_400))])
def test_a_rate_is_read_and_written(text: str, rate: Rate) -> None:
    assert Rate.parse(text) == rate
    assert str(rate) == text


@pytest.mark.parametrize("text", ["", "50", "0/s", "-1/s", "1.5/s", "5/x", "5/s ", "1" * 20 + "/s"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as"):
        Rate.parse(text)


async def test_a_full_bucket_is_emptied_at_once_and_refilled_evenly() -> None:
    clock = Clock()
    rates = Rates(clock=clock)
    rate = Rate(4, 2)
    assert [await rates.take("a", rate) for _ in range(4)] == [0.0] * 4
    assert await rates.take("a", rate) == pytest.approx(0.5)
    assert await rates.take("b", rate) == 0.0, "each key has its own bucket"
    clock.now += 0.5
    assert await rates.take("a", rate) == 0.0
    assert await rates.take("a", rate) == pytest.approx(0.5), "a refused call takes nothing"
    clock.now += 1000
    assert [await rates.take("a", rate) for _ in range(5)] == [0.0] * 4 + [pytest.approx(0.5)]


async def test_a_cost_is_taken_whole_or_not_at_all() -> None:
    rates = Rates(clock=Clock())
    rate = Rate(10, 1)
    assert await rates.take("a", rate, 8) == 0.0
    assert await rates.take("a", rate, 3) > 0.0
    assert await rates.take("a", rate, 2) == 0.0
    assert await rates.take("b", rate, 11) > 0.0, "a bucket never holds more than its size"


@given(
    count=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), min_size=1, max_size=40),
)
async def test_no_window_admits_more_than_a_bucket_and_its_refill(count: int, steps: list[tuple[float, int]]) -> None:
    clock, taken = Clock(), []
    rates, rate = Rates(clock=clock), Rate(count, 1)
    for seconds, cost in steps:
        clock.now += seconds
        if not await rates.take("a", rate, cost):
            taken.append((clock.now, cost))
    for begin, _ in taken:
        for end in (now for now, _ in taken if now >= begin):
            within = sum(cost for now, cost in taken if begin <= now <= end)
            assert within <= count + count * (end - begin) + 1e-6

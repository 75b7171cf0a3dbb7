"""Parts of a batch done side by side: in order, all of them, errors told once everybody has ended."""

import threading

import pytest

from service.engine.team import Team


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [0, 1, 2, 5, 16])
def test_results_come_in_the_order_of_the_parts(size: int, parts: int) -> None:
    assert Team(size).each(lambda part: part * part, list(range(parts))) == [part * part for part in range(parts)]


def test_two_parts_are_under_way_at_once() -> None:
    meeting = threading.Barrier(2, timeout=60)
    assert Team(2).each(lambda part: meeting.wait() >= 0, [0, 1]) == [True, True]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_is_told_when_the_others_have_ended(bad: int) -> None:
    ended: list[int] = []
    other_waits = threading.Event()

    def work(part: int) -> None:
        if part == bad:
            other_waits.set()
            raise ValueError("bad part")
        assert other_waits.wait(60)
        ended.append(part)

    with pytest.raises(ValueError, match="bad part"):
        Team(2).each(work, [0, 1])
    assert ended == [1 - bad]

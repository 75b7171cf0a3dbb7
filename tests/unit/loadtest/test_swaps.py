import json

from loadtest.lab.swaps import Tally

LETTERS = {"v1": "a-", "v2": "b-"}


def body(version: str, *ids: str) -> bytes:
    return json.dumps({"snapshot": version, "results": [{"hits": [{"id": name} for name in ids]}]}).encode()


def test_answers_are_counted_by_snapshot() -> None:
    tally = Tally()
    tally.add(200, body("v1", "a-1", "a-2"), LETTERS)
    tally.add(200, body("v2", "b-1"), LETTERS)
    assert (tally.answers, tally.mixed, tally.failures) == ({"v1": 1, "v2": 1}, 0, [])


def test_a_hit_of_the_other_snapshot_or_no_hit_at_all_is_mixed() -> None:
    tally = Tally()
    tally.add(200, body("v1", "a-1", "b-2"), LETTERS)
    tally.add(200, body("v1"), LETTERS)
    assert tally.mixed == 2


def test_a_status_other_than_200_is_a_failure() -> None:
    tally = Tally()
    tally.add(503, b"", LETTERS)
    assert tally.failures == ["status 503"]
    assert not tally.answers

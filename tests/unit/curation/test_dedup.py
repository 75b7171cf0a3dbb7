"""Equal and near-equal rows are kept once, also after a kill."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

from models.curation.dedup import Dedup

LONG = (
    "高血压患者应长期规律服药，低盐饮食，适当运动，定期测量血压，如有头晕头痛应及时就医。氨氯地平每日一次，早晨服用。"
)
EQUAL, NEAR = "equal to an earlier row", "near an earlier row (similarity 0.85 or more)"


def reasons(step: Dedup, *rows: dict[str, Any]) -> list[str]:
    return [outcome.dropped for outcome in step.apply(iter(rows))]


def test_rows_that_differ_in_case_width_or_punctuation_are_equal() -> None:
    rows = [
        {"text": "ＡＢＣ 发热，咳嗽。"},
        {"text": "abc发热咳嗽"},
        {"text": "发热"},
        {"text": "发 热！"},
        {"text": "发烧"},
    ]
    assert reasons(Dedup(), *rows) == ["", EQUAL, "", EQUAL, ""]


def test_near_equal_rows_are_dropped_unless_only_equal_ones_should_be() -> None:
    other = LONG.replace("早晨", "晚上")
    different = LONG[:30] + "糖尿病患者需要监测血糖，注意足部护理，每年检查眼底。"
    rows = [{"text": LONG}, {"text": other}, {"text": different}]
    assert reasons(Dedup(near=0.8), *rows) == ["", NEAR.replace("0.85", "0.8"), ""]
    assert reasons(Dedup(near=0.0), *rows) == ["", "", ""]
    assert reasons(Dedup(near=1.0), *rows, {"text": LONG}) == ["", "", "", EQUAL]


@pytest.mark.parametrize(
    ("by", "expected"), [("row", ["", "", ""]), ("query", ["", EQUAL, ""]), ("text", ["", "", EQUAL])]
)
def test_rows_are_compared_by_the_chosen_field(by: Literal["row", "query", "text"], expected: list[str]) -> None:
    rows = [{"query": "问一", "pos": ["答甲"]}, {"query": "问一", "pos": ["答乙"]}, {"query": "问二", "pos": ["答甲"]}]
    assert reasons(Dedup(by=by), *rows) == expected


def test_rows_with_nothing_to_compare_are_kept() -> None:
    """Documents without a title have no query; texts of signs alone are for clean to drop."""
    rows = [{"text": "发热"}, {"text": "咳嗽", "title": ""}, {"text": "……"}, {"text": "？！"}]
    assert reasons(Dedup(by="query"), *rows) == ["", "", "", ""]
    assert reasons(Dedup(by="text"), *rows) == ["", "", "", ""]


def test_a_resumed_run_gives_the_result_of_an_undisturbed_run() -> None:
    chance = random.Random(3)
    pool = ["".join(chance.choices("高血压糖尿病咳嗽发热头痛服药", k=60)) for _ in range(20)]
    texts = [text[:cut] + text[cut + 1 :] for text in chance.choices(pool, k=120) for cut in [chance.randrange(60)]]
    rows = [{"text": text} for text in texts]
    whole = reasons(Dedup(near=0.6), *rows)
    assert 20 <= whole.count("") < 100
    for stop in (1, 40, 119):
        resumed = Dedup(near=0.6)
        kept = (row for row, reason in zip(rows[:stop], whole[:stop], strict=True) if not reason)
        resumed.resume(stop, kept)
        assert reasons(resumed, *rows[stop:]) == whole[stop:]

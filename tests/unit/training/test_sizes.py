"""Examples and lengths that a plan estimates, from rows of known sizes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from models.rows import sample
from models.training.plan import SAMPLE, sizes_of
from models.training.recipe import Recipe
from models.training.stages import Data
from tests.support.toy_training import write_rows

Make = Callable[..., Recipe]
SHORT = {"query": "头痛", "pos": ["多喝水多睡觉。"], "source": "short"}
LONG = {"query": "what helps against a cold", "pos": ["rest " * 30], "source": "long"}


def sized(recipe: Recipe, **data: object) -> tuple[int, float, float]:
    found = sizes_of(recipe, Data.model_validate(data), 20, 20)
    assert found is not None
    return found.examples, found.query, found.document


def test_a_sample_counts_all_rows_and_is_drawn_from_all_of_them(tmp_path: Path) -> None:
    rows = [{"query": str(number), "pos": ["p"]} for number in range(1000)]
    first, second = write_rows(tmp_path / "a.jsonl", rows[:900]), write_rows(tmp_path / "b.jsonl", rows[900:])
    count, drawn = sample([first, second], 200, seed=1)
    numbers = [int(pair.query) for pair in drawn]
    assert count == 1000
    assert len(set(numbers)) == 200
    assert 400 < sum(numbers) / 200 < 600
    assert 5 <= sum(number >= 900 for number in numbers) <= 40
    assert sample([first, second], 5000, seed=1)[1] == sample([first, second], 1000, seed=2)[1], "all existing rows"


def test_long_first_rows_are_not_taken_for_the_whole_file(tmp_path: Path, toy_recipe: Make) -> None:
    path = str(write_rows(tmp_path / "pairs.jsonl", [LONG] * SAMPLE + [SHORT] * 3 * SAMPLE))
    count, query, document = sized(toy_recipe(), files=[path])
    assert count == 4 * SAMPLE
    # Five words and two characters, weighted one to three; twenty of thirty words are read, and seven characters.
    assert query == pytest.approx((5 + 3 * 2) / 4, rel=0.05)
    assert document == pytest.approx((20 + 3 * 7) / 4, rel=0.05)


def test_lengths_are_weighted_like_the_drawn_batches(tmp_path: Path, toy_recipe: Make) -> None:
    path = str(write_rows(tmp_path / "pairs.jsonl", [SHORT] * 9 + [LONG]))
    _, even, _ = sized(toy_recipe(), files=[path], weights={"*": 1.0})
    _, query, document = sized(toy_recipe(), files=[path], weights={"short": 0.0, "long": 1.0})
    assert even == pytest.approx((5 + 2) / 2)
    assert (query, document) == (5, 20)


def test_texts_crops_and_sentences_are_counted(tmp_path: Path, toy_recipe: Make) -> None:
    row = {"query": "头痛", "pos": ["多喝水多睡觉。少看手机电脑。"], "source": "s"}
    path = str(write_rows(tmp_path / "pairs.jsonl", [row] * 10))
    assert sized(toy_recipe(), files=[path], view="texts")[0] == 20
    assert sized(toy_recipe(), files=[path], view="texts", sentences=True)[0] == 40
    assert sized(toy_recipe(), files=[path], view="texts", crops={"*": 3.0})[0] == 50


def test_rows_that_a_stage_will_make_are_estimated_from_its_input(tmp_path: Path, toy_recipe: Make) -> None:
    path = str(write_rows(tmp_path / "pairs.jsonl", [SHORT] * 7))
    stages = {
        "first": {"kind": "mine", "query": "query", "files": [path]},
        "mine": {"kind": "mine", "query": "query", "files": ["@first"]},
    }
    tune = toy_recipe().stages["tune"].model_dump(exclude_none=True) | {"data": {"files": ["@mine"]}}
    recipe = toy_recipe(extra={"stages": stages | {"tune": tune}})
    assert sized(recipe, files=["@mine"])[0] == 7
    missing = toy_recipe(
        extra={"stages": stages | {"first": stages["first"] | {"files": ["none.jsonl"]}, "tune": tune}}
    )
    assert sizes_of(missing, Data(files=["@mine"]), 20, 20) is None


def test_sources_that_are_left_out_are_not_counted(tmp_path: Path, toy_recipe: Make) -> None:
    path = str(write_rows(tmp_path / "pairs.jsonl", [SHORT] * 3 + [LONG] * SAMPLE))
    count, query, document = sized(toy_recipe(), files=[path], without=["long"])
    assert count == pytest.approx(3, abs=1)
    assert (query, document) == (2, 7)
    assert sized(toy_recipe(), files=[path], without=["long", "short"])[0] == 0

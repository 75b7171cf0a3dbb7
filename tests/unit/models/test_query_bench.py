from pathlib import Path

import pytest

from models.bench.queries import main, measure
from models.errors import BadData

EXAMPLES = Path(__file__).parents[3] / "examples"
ENCODER = Path(__file__).parents[3] / "models" / "pretrained" / "care-small-zh"


def test_systems_take_turns_and_each_round_counts_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.bench.queries.WARM_UP_SECONDS", -1.0)
    asked: list[str] = []
    systems = {name: lambda question, name=name: asked.append(name) for name in ("one", "two")}
    questions = [("q", None, None)] * 3
    rates = measure(systems, questions, rounds=2)  # type: ignore[arg-type]
    assert asked == (["one"] * 4 + ["two"] * 4) * 2
    assert all(len(of_system) == 2 and min(of_system) > 0 for of_system in rates.values())


def test_prints_a_row_for_words_the_encoder_and_their_hybrid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(EXAMPLES), "--hybrid", str(ENCODER), "--queries", "2", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert names == ["BM25", "care-small-zh (int8)", "hybrid care-small-zh (int8)"]
    assert lines[-1].startswith("2 queries of ")


def test_two_encoders_of_one_name_are_refused() -> None:
    with pytest.raises(BadData, match=r"two systems are called 'care-small-zh \(int8\)'"):
        main([str(EXAMPLES), "--encoder", str(ENCODER), "--hybrid", str(ENCODER)])


def test_a_folder_without_a_retrieval_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData):
        main([str(tmp_path)])

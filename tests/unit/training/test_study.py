"""Studies: variants of a recipe with several seeds, which share vectors, and the table of their figures."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.errors import BadData, CareError
from models.evaluation import judge
from models.training import study
from models.training.recipe import Recipe
from models.training.recipe_file import Tables, apply_change, overlaid
from models.training.run import train
from models.training.stages import files_of
from tests.support.tiny_models import tiny_encoder
from tests.support.toy_training import ONE, TOPICS, plain, toy_rows, write_dev, write_rows, write_start

STUDIES = sorted(Path("models/training/studies").resolve().glob("*.toml"))
RECIPE = """
about = "toy"
space = "toy"
dim = 32
encoders.query = { start = "query", pooling = "cls", max_length = 40 }
encoders.document = { start = "document", pooling = "eos", max_length = 40 }

[stages.tune]
kind = "contrast"
query = "query"
document = "document"
train = ["query"]
data = { files = ["rows.jsonl"] }
batch = 4
steps = 2
lr = 1e-3
tokens = 150
loss = { mse = 1.0 }
"""
STUDY = """
base = "recipe.toml"
documents = "document"
seeds = [1, 2]

[variants.whole]

[variants.without-mse]
stages.tune.loss.mse = 0.0
"""
# Sizes that a test can afford.
TOY = [
    "dim=32",
    "max_steps=1",
    "stages.*.batch=4",
    "stages.*.tokens=1000",
    "encoders.*.max_length=32",
    "encoders.*.layers=1",
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, architecture in (("query", "bert"), ("document", "qwen3")):
        write_start(tmp_path / name, architecture, layers=1)
    write_rows(tmp_path / "rows.jsonl", plain(toy_rows()))
    write_dev(tmp_path / "dev")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def test_folders_without_a_retrieval_set_are_refused_before_training(home: Path) -> None:
    write_rows(home / "empty/sts/a.jsonl", [{"a": "x", "b": "y", "score": score} for score in (0, 1)])
    with pytest.raises(BadData, match="empty: no retrieval set to judge by"):
        study.study(home / "study.toml", [home / "empty"], home / "out")
    assert not (home / "out").exists()


def test_a_study_that_could_not_judge_is_refused_before_training(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "find_spec", lambda name: None)
    with pytest.raises(CareError, match=r"needs ranx, scipy: pip install 'care-search\[eval\]'"):
        study.study(home / "study.toml", [home / "dev"], home / "out")
    assert not (home / "out").exists()


def test_variants_are_trained_with_each_seed_and_judged(home: Path) -> None:
    text = study.study(home / "study.toml", [home / "dev"], home / "out", at_once=2)
    assert [line.split(" | ")[:2] for line in text.splitlines()[2:]] == [["| whole", "2"], ["| without-mse", "2"]]
    assert text.count("±") >= 4
    assert (home / "out" / "table.md").read_text() == text + "\n"
    # Runs of one seed draw the same rows: the document encoder has read their queries and documents once.
    assert len(list((home / "out" / "vectors").glob("*.f16"))) == 2 * 2
    assert not (home / "out" / "runs" / "whole" / "1" / "vectors").exists()
    log = home / "out" / "runs" / "whole" / "1" / "log"
    before = log.read_text()
    assert "stage tune" in before
    assert study.study(home / "study.toml", [home / "dev"], home / "out") == text
    assert log.read_text() == before


def test_a_study_that_is_stopped_has_compared_its_variants(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = study._figures

    def stop_at_the_third(run: study.Run, *others: object) -> study.Figures:
        if run.seed == 2:
            raise KeyboardInterrupt
        return judged(run, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(study, "_figures", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        study.study(home / "study.toml", [home / "dev"], home / "out")
    lines = (home / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| whole", "1"], ["| without-mse", "1"]]


def test_a_run_that_fails_is_named_and_the_others_go_on(home: Path) -> None:
    (home / "study.toml").write_text(f"{STUDY}\n[variants.broken]\nencoders.query.start = 'nowhere'\n")
    with pytest.raises(CareError, match="2 of 6 runs failed") as error:
        study.study(home / "study.toml", [home / "dev"], home / "out")
    assert "| whole | 2 |" in str(error.value)
    assert "nowhere is not there" in (home / "out" / "runs" / "broken" / "1" / "log").read_text()
    assert "broken" not in (home / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = []", "seeds"),
        ("seeds = [1]\nnonsense = 1", "nonsense"),
        ("seeds = [1]\n[variants.'..']", "variants"),
        ("seeds = [1, 1]", "twice"),
        ("seeds = [-1]", "seeds"),
        ("seeds = [1]\n[variants.one]\nseed = 7", "leave it out"),
        ("seeds = [1]\n[variants.one]\ndocuments = 'documnet'", "neither an encoder of the recipe nor a folder"),
        ("seeds = [1]\n[variants.one]\ndocuments = 'other'", "other is of space tiny, the recipe's is toy"),
        ("seeds = [1]\n[variants.one]\nstages.tune.batsch = 3", "one: stages.tune"),
        ("seeds = [", "study.toml"),
    ],
)
def test_a_faulty_study_is_refused_before_anything_is_trained(home: Path, text: str, message: str) -> None:
    tiny_encoder("bert").save(home / "other")
    rest = "" if "[variants" in text else "\n[variants.one]"
    (home / "study.toml").write_text(f'base = "recipe.toml"\ndocuments = "document"\n{text}{rest}')
    with pytest.raises(BadData, match=message):
        study.study(home / "study.toml", [home / "dev"], home / "out")
    assert not (home / "out").exists()


def test_a_run_that_cannot_be_judged_does_not_end_the_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = study._figures

    def judged(run: study.Run, *others: Any) -> study.Figures:  # noqa: ANN401 - passed on
        if run.variant == "whole":
            raise CareError("no such dimensions")
        return figures(run, *others)

    monkeypatch.setattr(study, "_figures", judged)
    with pytest.raises(CareError, match="2 of 4 runs failed") as error:
        study.study(home / "study.toml", [home / "dev"], home / "out")
    assert "| without-mse | 2 |" in str(error.value)


def test_an_out_that_cannot_be_a_folder_is_refused(home: Path) -> None:
    (home / "out").write_text("")
    with pytest.raises(BadData, match=r"--out .*out: .*; name a folder that can be written"):
        study.study(home / "study.toml", [home / "dev"], home / "out")


def runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_study_that_is_terminated_ends_its_runs_and_goes_on(home: Path) -> None:
    (home / "study.toml").write_text(STUDY.replace("seeds = [1, 2]", "seeds = [1]"))
    (home / "recipe.toml").write_text(RECIPE.replace("steps = 2", "steps = 100000"))
    call = [sys.executable, "-m", "models.training.study", "study.toml", "dev", "--out", "out"]
    where = {"cwd": home, "env": os.environ | {"PYTHONPATH": str(STUDIES[0].parents[3])}}
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True, **where) as process:  # type: ignore[call-overload]
        log = home / "out/runs/whole/1/log.jsonl"
        while not log.is_file() or not log.stat().st_size:
            assert process.poll() is None
            time.sleep(0.1)
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")
        children = [child for thread in threads for child in thread.read_text().split()]
        process.terminate()
        assert "study: stopped; the same call goes on" in process.communicate(timeout=60)[1]
    assert children
    while any(map(runs, children)):  # until the test's own limit
        time.sleep(0.1)


def test_a_table_has_means_and_deviations() -> None:
    found = {"one": [{"a": 1.0, "b": 3.0}, {"a": 3.0, "b": 3.0}], "two": [{"a": 5.0, "b": 6.0}]}
    assert study.table(found).splitlines()[2:] == [
        "| one | 2 | 2.50 ± 0.71 | 2.00 ± 1.41 | 3.00 ± 0.00 |",
        "| two | 1 | 5.50 | 5.00 | 6.00 |",
    ]


def rows_of(source: str) -> list[dict[str, object]]:
    """Texts of its own: one that several sources have counts for the first."""
    text = json.dumps(plain(toy_rows(source)), ensure_ascii=False)
    for topic in TOPICS:
        text = text.replace(topic, f"{source}{topic}").replace(topic[::-1], f"{source}{topic[::-1]}")
    rows: list[dict[str, object]] = json.loads(text)
    return rows


def test_variants_on_labelled_pairs_have_no_crops(tmp_path: Path) -> None:
    (path,) = [each for each in STUDIES if each.stem == "care-tables"]
    stages = {run.variant: run.recipe.stages["align"].data for run in study.runs_of(path, tmp_path)}
    labelled = {variant: data for variant, data in stages.items() if data.view == "pairs"}
    assert len(labelled) == 6
    assert not any(share for data in labelled.values() for share in data.crops.values())
    assert any(stages["care"].crops.values())


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_variant_of_a_bundled_study_trains(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(below: Tables, above: Tables) -> Tables:
        tables = overlaid(below, above)
        joined = any("beside" in encoder for encoder in tables["encoders"].values())
        for change in [*TOY, *(["encoders.query.projection=64", "encoders.query.dim=64"] if joined else [])]:
            apply_change(tables, change, ["layers", "max_length", "batch", "tokens"])
        return tables

    monkeypatch.setattr(study, "overlaid", toy)
    runs = [run for run in study.runs_of(path, tmp_path / "out") if run.seed == 1]
    models = Path("models").resolve()
    monkeypatch.chdir(tmp_path)
    Path("models").symlink_to(models)
    for run in runs:
        for encoder in run.recipe.encoders.values():
            if encoder.start is not None and not encoder.start.exists():
                write_start(encoder.start, "bert" if "-zh" in encoder.start.name else "qwen3", layers=3)
        for stage in run.recipe.stages.values():
            # `queries` are no source of a file: a stage makes them of the rows of all.
            sources = {*stage.data.weights, *stage.data.crops, *stage.data.without, "toy"} - {"*", "queries"}
            for file in files_of(stage):
                write_rows(Path(file), [row for source in sorted(sources) for row in rows_of(source)])
        folders = train(Recipe.model_validate(run.recipe), run.folder, ONE, tmp_path / "vectors")
        query, own = (Path(each.partition(",")[0]) for each in run.pair())
        assert query in folders
        assert own in folders or own.parts[0] == "data"

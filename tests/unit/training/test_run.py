"""Runs of toy recipes: learning, freezing, resuming to the same weights, and refusals."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cli import main
from models import progress as shown
from models.encoder.spec import Side
from models.encoder.torch import TorchEncoder
from models.errors import BadData, BadEncoder, CareError
from models.training import loop
from models.training import monitor as progress
from models.training.loop import Stopped, schedule
from models.training.recipe import Recipe
from models.training.run import train
from tests.support.toy_training import DOCUMENTS, ONE, QUERIES, recipe_toml, write_dev, write_rows

Make = Callable[..., Recipe]
ROOT = Path.cwd()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(TorchEncoder.load(folder).state_dict())


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=0)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Sends Ctrl-C during a step, after the first `steps` are done."""
    from models.training.contrast import ContrastStage

    plain = ContrastStage.gradients

    def interrupted(self: ContrastStage, step: int, scale: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        if step == steps - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, step, scale)

    monkeypatch.setattr(ContrastStage, "gradients", interrupted)


def test_a_copy_stays_what_it_was_when_a_stage_first_read_it(tmp_path: Path, toy_recipe: Make) -> None:
    """Also when the run goes on later, here with the second stage."""
    plain = toy_recipe()
    teacher = plain.encoders["query"].model_copy(update={"start": None, "copy_of": "query"})
    first = plain.stages["tune"].model_copy(update={"document": "teacher"})
    recipe = plain.model_copy(
        update={"encoders": plain.encoders | {"teacher": teacher}, "stages": {"first": first, "second": first}}
    )
    folders = dict(zip(("query", "teacher"), train(recipe, tmp_path / "run", ONE), strict=True))
    start, taught, trained = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "query", folders["teacher"], folders["query"])
    )
    assert all(torch.equal(start[name], value) for name, value in taught.items())
    assert not all(torch.equal(start[name], value) for name, value in trained.items())

    query = tmp_path / "run" / "second" / "query"
    (tmp_path / "run" / "second" / "done.json").unlink()
    shutil.rmtree(query)
    train(recipe, tmp_path / "run", ONE)
    assert all(torch.equal(trained[name], value) for name, value in load_file(query / "model.safetensors").items())


def test_ctrl_c_saves_and_the_same_call_reaches_the_same_weights(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = toy_recipe(average=0.5, loss={"learnable": True, "temperature": 0.1})
    (whole,) = train(recipe, tmp_path / "whole", ONE)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped, match="step 3 of 6 of tune"):
            train(recipe, tmp_path / "parts", ONE)
    (parts,) = train(recipe, tmp_path / "parts", ONE)
    assert_same(whole, parts)
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 4, 6]
    assert not (tmp_path / "parts" / "tune" / "checkpoint").exists()


def test_a_stopped_stage_does_not_go_on_with_other_rows(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = toy_recipe()
    rows = (tmp_path / "rows.jsonl").read_text()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            train(recipe, tmp_path / "run", ONE)
    for other in (rows.replace('"source": "b"', '"source": "c"'), "".join(rows.splitlines(keepends=True)[:8])):
        assert other != rows
        (tmp_path / "rows.jsonl").write_text(other)
        with pytest.raises(CareError, match=r"tune: its rows are not those that it began with: .* another --out"):
            train(recipe, tmp_path / "run", ONE)
    (tmp_path / "rows.jsonl").write_text(rows)
    train(recipe, tmp_path / "run", ONE)


def test_an_encoder_that_training_ruined_is_not_written(tmp_path: Path, toy_recipe: Make) -> None:
    with pytest.raises(BadEncoder, match="query: a vector is not finite after training: try a lower learning rate"):
        train(toy_recipe(steps=1, lr=1e30), tmp_path / "run", ONE)
    assert not (tmp_path / "run/tune/query").exists()


def test_averaging_begins_with_the_fitted_projection(tmp_path: Path, toy_recipe: Make) -> None:
    encoders = toy_recipe().model_dump(mode="json")["encoders"]
    encoders["query"]["projection"] = 32
    settings = {"document": "document", "loss": {"info_nce": 0.0, "mse": 1.0}, "steps": 1, "lr": 1e-30}
    fitted, averaged = (
        train(toy_recipe(extra={"encoders": encoders}, average=average, **settings), tmp_path / str(average), ONE)[0]
        for average in (1.0, 0.5)
    )
    torch.testing.assert_close(weights(averaged)["projection.weight"], weights(fitted)["projection.weight"])


def test_ctrl_c_in_the_last_step_of_a_stage_ends_the_run_too(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped, match="step 2 of 2 of tune"):
            train(toy_recipe(steps=2), tmp_path / "run", ONE)
    assert "stops after this step" in capfd.readouterr().err
    (folder,) = train(toy_recipe(steps=2), tmp_path / "run", ONE)
    assert TorchEncoder.load(folder).spec.space == "toy"


def test_texts_are_tokenised_before_the_first_step(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first step, and every reported speed and remaining time, would include tokenising."""
    from models.training import contrast

    happened: list[str] = []
    build, gradients = contrast.TokenTable.build, contrast.ContrastStage.gradients
    monkeypatch.setattr(contrast.TokenTable, "build", lambda *a: happened.append("tokens") or build(*a))
    monkeypatch.setattr(contrast.ContrastStage, "gradients", lambda *a: happened.append("step") or gradients(*a))
    train(toy_recipe(steps=2), tmp_path / "run", ONE)
    assert happened == ["tokens", "tokens", "step", "step"]


@pytest.mark.picture
def test_training_brings_pairs_together_and_the_curves_are_drawn(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe(steps=60, lr=2e-3, loss={"temperature": 0.1})
    (folder,) = train(recipe, tmp_path / "run", ONE)
    encoder = TorchEncoder.load(folder)
    assert encoder.spec.space == "toy"
    assert encoder.spec.dim == 32

    def margin(encoder: TorchEncoder) -> float:
        scores = encoder.encode(QUERIES, Side.QUERY) @ encoder.encode(DOCUMENTS, Side.DOCUMENT).T
        return float(scores.diagonal().mean() - scores.mean())

    start = TorchEncoder.load(tmp_path / "query", encoder.spec)
    assert margin(encoder) > margin(start) + 0.1
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert train(recipe, tmp_path / "run", ONE) == [folder], "finished stages are not repeated"


def test_stage_one_does_not_change_the_frozen_encoder_and_reads_texts_once(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [str(tmp_path / "rows.jsonl")]
    recipe = toy_recipe(
        document="document",
        steps=None,
        epochs=4,
        data={"files": rows, "view": "texts", "sentences": True, "crops": {"*": 1.0}},
        loss={"info_nce": 1.0, "mse": 1.0, "temperature": 0.05},
    )
    before = {path.name: path.read_bytes() for path in (tmp_path / "document").iterdir()}
    frozen = TorchEncoder.load(tmp_path / "document", _spec(recipe, tmp_path, "document"))
    vectors = frozen.encode(QUERIES, Side.DOCUMENT)
    folder, read = train(recipe, tmp_path / "run", ONE)
    assert (folder.name, read.name) == ("query", "document")
    pair = TorchEncoder.load(read)
    assert (pair.spec.dim, pair.spec.max_length, pair.spec.space) == (32, 40, "toy"), "as the pair needs it"
    np.testing.assert_array_equal(pair.encode(QUERIES, Side.DOCUMENT), vectors)
    assert {path.name: path.read_bytes() for path in (tmp_path / "document").iterdir()} == before
    torch.testing.assert_close(torch.from_numpy(frozen.encode(QUERIES, Side.DOCUMENT)), torch.from_numpy(vectors))
    (kept,) = (tmp_path / "run" / "vectors").glob("*.f16")
    found = np.fromfile(kept, dtype=np.float16).reshape(-1, 32).astype(np.float32)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-3), "truncated first, then normalised"
    assert any(np.abs(row - vectors[0]).max() < 1e-3 for row in found)
    aligned = TorchEncoder.load(folder).encode(QUERIES, Side.QUERY)
    start = TorchEncoder.load(tmp_path / "query", TorchEncoder.load(folder).spec).encode(QUERIES, Side.QUERY)
    assert (aligned * vectors).sum() > (start * vectors).sum()


def _spec(recipe: Recipe, folder: Path, name: str):  # noqa: ANN202
    from models.training.encoders import EncoderStore

    return EncoderStore(recipe, folder, ONE).spec(name)


def test_cached_vectors_of_another_encoder_are_not_used(tmp_path: Path, toy_recipe: Make) -> None:
    rows = [str(tmp_path / "rows.jsonl")]
    stage = {"document": "document", "data": {"files": rows, "view": "texts"}, "steps": 1}
    recipe = toy_recipe(**stage)
    train(recipe, tmp_path / "run", ONE)
    other = recipe.model_copy(
        update={"encoders": recipe.encoders | {"document": _instructed(recipe.encoders["document"])}}
    )
    (tmp_path / "run" / "recipe.json").unlink()
    (tmp_path / "run" / "tune" / "done.json").unlink()
    train(other, tmp_path / "run", ONE)
    assert len(list((tmp_path / "run" / "vectors").glob("*.f16"))) == 2


def _instructed(encoder):  # noqa: ANN001, ANN202
    return encoder.model_copy(update={"document_instruction": "文："})


def test_snapshots_are_encoders_of_intermediate_steps(tmp_path: Path, toy_recipe: Make) -> None:
    (whole,) = train(toy_recipe(snapshots=[2, 6]), tmp_path / "run", ONE)
    assert_same(whole, tmp_path / "run" / "tune" / "at-6" / "query")
    early, late = (weights(tmp_path / "run" / "tune" / f"at-{step}" / "query") for step in (2, 6))
    assert any(not torch.equal(early[name], late[name]) for name in late)


def test_a_stage_ends_after_its_minutes_and_its_rate_falls_by_time(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    recipe = toy_recipe(steps=100, minutes=0.2, snapshots=[1, 2, 6, 11, 12])
    rates = list[float]()
    plain = loop.schedule
    monkeypatch.setattr(loop, "schedule", lambda *given: rates.append(plain(*given)) or rates[-1])  # type: ignore[func-returns-value]
    train(recipe, tmp_path / "run", ONE)
    assert "stage tune: 12 steps" in capsys.readouterr().err, "one a second"
    assert rates == pytest.approx([1 - int(100 * step / 12) / 100 for step in range(12)])
    assert (tmp_path / "run" / "tune" / "at-12").is_dir()
    logged = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert logged == [1, 10, 12]


def test_judging_takes_none_of_a_stages_minutes(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    write_dev(tmp_path / "dev")
    judged = list[int]()
    monkeypatch.setattr(
        progress.DevSets, "figure", lambda self, read: float(len([judged.append(next(seconds)) for _ in range(50)]))
    )
    recipe = toy_recipe(steps=100, minutes=0.1, extra={"dev": {"folder": str(tmp_path / "dev"), "every": 2}})
    train(recipe, tmp_path / "run", ONE)
    assert "stage tune: 6 steps" in capsys.readouterr().err
    assert len(judged) == 3 * 50


def test_a_stage_that_has_used_its_minutes_is_not_trained_further(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    recipe = toy_recipe(steps=100, minutes=0.1, schedule="constant")
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Stopped, match="step 6 of 100"):
            train(recipe, tmp_path / "run", ONE)
    before = load_file(tmp_path / "run" / "tune" / "checkpoint" / "weights.safetensors")
    (folder,) = train(recipe, tmp_path / "run", ONE)
    assert "stage tune: 6 steps" in capsys.readouterr().err
    for name, value in weights(folder).items():
        torch.testing.assert_close(before[f"query/{name}"], value, rtol=0, atol=0)


def test_a_stage_with_minutes_counts_those_before_it_was_stopped(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    recipe = toy_recipe(steps=100, minutes=0.1)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped, match="step 4 of 100"):
            train(recipe, tmp_path / "run", ONE)
    train(recipe, tmp_path / "run", ONE)
    assert "stage tune: 6 steps" in capsys.readouterr().err


def test_the_best_checkpoint_is_kept(tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.training import monitor as dev

    write_dev(tmp_path / "dev")
    figures = iter([10.0, 30.0, 20.0])
    monkeypatch.setattr(dev.DevSets, "figure", lambda self, read: next(figures))
    extra = {"dev": {"folder": str(tmp_path / "dev"), "every": 2}}
    (judged,) = train(toy_recipe(extra=extra), tmp_path / "judged", ONE)
    # The second figure, after four of six steps, was the best.
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            train(toy_recipe(), tmp_path / "four", ONE)
    four = load_file(tmp_path / "four" / "tune" / "checkpoint" / "weights.safetensors")
    for name, value in weights(judged).items():
        torch.testing.assert_close(four[f"query/{name}"], value, rtol=0, atol=0)
    lines = [json.loads(line) for line in (tmp_path / "judged" / "log.jsonl").read_text().splitlines()]
    assert [line["dev"] for line in lines if "dev" in line] == [10.0, 30.0, 20.0]


def test_dev_figures_are_those_of_care_eval(tmp_path: Path, toy_recipe: Make) -> None:
    write_dev(tmp_path / "dev")
    extra = {"dev": {"folder": str(tmp_path / "dev"), "every": 30}}
    train(toy_recipe(extra=extra, steps=30, loss={"temperature": 0.1}), tmp_path / "run", ONE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (judged,) = [line for line in lines if "dev" in line]
    assert 30 < judged["dev"] <= 100
    assert judged["metric"] == "nDCG@10"


def test_an_unknown_metric_is_refused_at_once(tmp_path: Path, toy_recipe: Make) -> None:
    write_dev(tmp_path / "dev")
    extra = {"dev": {"folder": str(tmp_path / "dev"), "every": 30, "metric": "nDCG@11"}}
    with pytest.raises(BadData, match=r"dev\.metric: 'nDCG@11' is not one of nDCG@10"):
        train(toy_recipe(extra=extra), tmp_path / "run", ONE)
    assert not (tmp_path / "run").exists()


NEVER = -1
KILLED_AT = """
import os, signal, sys
import cli
from models.training import run
from models.training.contrast import ContrastStage

run.draw_curves = lambda folder: None
plain = ContrastStage.gradients
recipe, *runs = sys.argv[1:]
for folder, last in zip(runs[::2], map(int, runs[1::2])):
    if (child := os.fork()) == 0:
        os.dup2(2, 1)
        def gradients(self, step, scale):
            if step == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, step, scale)

        ContrastStage.gradients = gradients
        os._exit(cli.main(["train", recipe, "--out", folder, "--device", "cpu"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_run_killed_at_a_random_step_resumes_to_the_same_weights(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe(steps=12, checkpoint_every=3)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_toml(recipe))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    # Each run in a separate process: what other tests did to torch in this one must not count.
    given = [path, whole, NEVER, killed, random.randrange(1, 12), killed, NEVER]
    command = [sys.executable, "-c", KILLED_AT, *map(str, given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["0", str(-signal.SIGKILL), "0"], done.stderr
    assert_same(*(tmp_path / folder / "encoders" / "query" for folder in ("whole", "killed")))


def test_a_folder_of_another_recipe_is_refused(tmp_path: Path, toy_recipe: Make) -> None:
    train(toy_recipe(steps=1), tmp_path / "run", ONE)
    with pytest.raises(CareError, match=r"another recipe \(stages.tune.lr is 0.001 there, 0.5 here\)"):
        train(toy_recipe(steps=1, lr=0.5), tmp_path / "run", ONE)


def test_missing_files_of_later_stages_are_reported_before_the_first_stage(tmp_path: Path, toy_recipe: Make) -> None:
    values = toy_recipe(steps=1).model_dump()
    later = values["stages"]["tune"] | {"data": {"files": [str(tmp_path / "gone.jsonl")]}}
    recipe = Recipe.model_validate(values | {"stages": values["stages"] | {"later": later}})
    with pytest.raises(BadData, match=r"stages\.later: .*gone.jsonl is not there"):
        train(recipe, tmp_path / "run", ONE)
    assert not (tmp_path / "run").exists(), "the folder is free for the corrected recipe"


def test_missing_hard_negatives_are_an_error(tmp_path: Path, toy_recipe: Make) -> None:
    rows = write_rows(tmp_path / "bare.jsonl", [{"query": "问", "pos": ["答"]}])
    with pytest.raises(BadData, match=r"data\.negatives is 2, but no row has neg"):
        train(toy_recipe(data={"files": [str(rows)], "negatives": 2}), tmp_path / "run", ONE)


def test_a_gradient_that_is_not_finite_ends_the_run(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.training.contrast import ContrastStage

    plain = ContrastStage.gradients

    def broken(self: ContrastStage, step: int, scale: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        facts = plain(self, step, scale)
        if step == 3:
            next(self.encoders["query"].parameters()).grad.fill_(torch.nan)
        return facts

    monkeypatch.setattr(ContrastStage, "gradients", broken)
    with pytest.raises(CareError, match="tune: the gradient of step 4 is not finite"):
        train(toy_recipe(), tmp_path / "run", ONE)
    checkpoint = load_file(tmp_path / "run" / "tune" / "checkpoint" / "weights.safetensors")
    assert all(value.isfinite().all() for value in checkpoint.values())


def test_figures_of_a_step_are_read_now_and_then_and_before_weights_are_kept(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one waits for the GPU, which then idles while the next step is prepared."""
    read: list[str] = []
    monkeypatch.setattr(loop, "_require_finite", lambda norm, scale, what: read.append(what.split()[-1]))
    train(toy_recipe(steps=25, checkpoint_every=7), tmp_path / "run", ONE)
    assert list(dict.fromkeys(read)) == ["7", "10", "14", "20", "21", "25"]


def test_a_full_disk_is_reported(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    (tmp_path / "recipe.toml").write_text(recipe_toml(toy_recipe()))
    monkeypatch.setattr("models.training.loop.save_file", full)
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 1
    assert "No space left on device (os error 28); free some space" in capsys.readouterr().err


def test_a_run_may_result_in_rows_only(tmp_path: Path, toy_recipe: Make, capsys: pytest.CaptureFixture[str]) -> None:
    mine = {"kind": "mine", "query": "query", "files": [str(tmp_path / "rows.jsonl")], "count": 1}
    (tmp_path / "recipe.toml").write_text(recipe_toml(toy_recipe(extra={"stages": {"find": mine}})))
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    out, errors = capsys.readouterr()
    assert out == f"{tmp_path}/run/find/pairs.jsonl: rows for the `files` of a recipe\n"
    assert "stage find: 12 pairs, 12 mined, 12 negatives" in errors


def test_without_a_terminal_a_run_prints_its_progress(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "SAY_EVERY_SECONDS", 0.0)
    train(toy_recipe(steps=2), tmp_path / "run", ONE)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stage tune: contrast"
    assert any(re.fullmatch(rf"read {tmp_path}/rows.jsonl, 12 rows: [\d.,]+ rows/s", line) for line in lines)
    assert any(line.startswith("tokenise 8 texts (query), 1 of 1 chunks: ") for line in lines)
    step = r"tune, 1 of 2 steps: loss [\d.]+, texts/s \d+, GiB [\d.]+, \d\d:\d\d left"
    assert any(re.fullmatch(step, line) for line in lines)
    assert lines[-1] == "stage tune: 2 steps"


def test_a_frozen_encoder_reads_only_the_texts_that_the_steps_draw(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of twelve rows are drawn; what the teacher reads before the first step is reported."""
    monkeypatch.setattr("models.progress.SAY_EVERY_SECONDS", 0.0)
    loss = {"info_nce": 0.0, "distil": 1.0, "teacher": "document"}
    stage = {"loss": loss, "data": {"files": [str(tmp_path / "rows.jsonl")], "leaf": 2}, "document": "document"}
    recipe = toy_recipe(extra={"max_steps": 1}, **stage)
    train(recipe, tmp_path / "run", ONE)
    read = [np.fromfile(path, np.float16).reshape(-1, 32) for path in (tmp_path / "run" / "vectors").glob("*.f16")]
    assert sorted(map(len, read)) == [4, 4], "queries and documents of one batch, without negatives"
    assert "encode 4 texts once, 1 of" in capsys.readouterr().err


def test_the_texts_of_a_stage_are_removed_when_it_is_done(tmp_path: Path, toy_recipe: Make) -> None:
    train(toy_recipe(steps=1), tmp_path / "run", ONE)
    assert sorted(path.name for path in (tmp_path / "run" / "tune").iterdir()) == ["done.json", "query"]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16
def test_two_stages_of_adapters_lose_nothing_to_rounding(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the first weights plus both adapters, in float32, however coarse the frozen base is."""
    from models.training.encoders import EncoderStore

    adapters: list[dict[str, torch.Tensor]] = []
    write = EncoderStore.write

    def spied(self: EncoderStore, name: str, encoder: TorchEncoder, folder: Path) -> None:
        parts = {}
        for key, module in encoder.backbone.named_modules():
            if hasattr(module, "lora_A"):
                product = module.lora_B["default"].weight @ module.lora_A["default"].weight
                parts[key.removeprefix("base_model.model.")] = module.scaling["default"] * product.detach()
        adapters.append(parts)
        write(self, name, encoder, folder)

    monkeypatch.setattr(EncoderStore, "write", spied)
    plain = toy_recipe(lr=1e-2)
    config = plain.encoders["query"].model_dump() | {"lora": {"rank": 2, "alpha": 4}, "dtype": "bf16"}
    stage = plain.stages["tune"].model_dump()
    recipe = Recipe.model_validate(
        plain.model_dump() | {"encoders": {"query": config}, "stages": {"one": stage, "two": stage}}
    )
    (folder,) = train(recipe, tmp_path / "run", ONE)
    start, found = TorchEncoder.load(tmp_path / "query", _spec(recipe, tmp_path, "query")), TorchEncoder.load(folder)
    assert len(adapters) == 2
    before, after = start.backbone.state_dict(), found.backbone.state_dict()
    for key, first in adapters[0].items():
        expected = before[f"{key}.weight"] + first + adapters[1][key]
        torch.testing.assert_close(after[f"{key}.weight"], expected, rtol=0, atol=1e-6)


def test_a_truncated_line_of_the_log_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"stage": "a", "step": 1, "loss": 2}\n{"stage": "a", "st\n')
    assert progress.read_log(tmp_path) == {"a": [{"stage": "a", "step": 1, "loss": 2}]}


def test_missing_weights_are_named(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe()
    encoder = recipe.encoders["query"].model_copy(update={"start": Path("nowhere")})
    with pytest.raises(BadEncoder, match=r"encoders\.query\.start: nowhere is not there"):
        train(recipe.model_copy(update={"encoders": {"query": encoder}}), tmp_path / "run", ONE)


def test_dimensions_beyond_the_encoders_are_refused(tmp_path: Path, toy_recipe: Make) -> None:
    with pytest.raises(BadData, match="128 is more than the 64"):
        train(toy_recipe(loss={"dims": [128, 32]}), tmp_path / "run", ONE)


def test_the_learning_rate_rises_then_falls() -> None:
    shares = [schedule(step, 100, 0.1, "linear") for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == pytest.approx(1)
    assert shares[-1] == pytest.approx(1 / 90)
    assert sorted(shares[10:], reverse=True) == shares[10:]
    assert schedule(4, 100, 5, "linear") == 1, "from 1 on it is a number of steps"
    assert schedule(0, 100, 0, "constant") == schedule(99, 100, 0, "constant") == 1
    assert schedule(50, 100, 0, "cosine") == pytest.approx(0.5)


def test_a_second_process_is_refused_in_the_same_folder(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe(steps=1)
    train(recipe, tmp_path / "run", ONE)
    held = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(CareError, match="another process trains there"):
        train(recipe, tmp_path / "run", ONE)
    os.close(held)
    train(recipe, tmp_path / "run", ONE)

"""Generate stages: prompts and loss, chunks, resuming, saved folders, and refused settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.encoder.gguf import unpack_gguf
from models.encoder.torch_generator import TorchGenerator
from models.errors import BadData, BadEncoder
from models.prompts import BLIND, fill, load
from models.training.encoders import EncoderStore
from models.training.generate import GenerateStage
from models.training.plan import plan
from models.training.ranks import Ranks
from models.training.recipe import Dev, Recipe
from models.training.run import train
from models.training.sources import make
from tests.support.toy_training import (
    ONE,
    QUERIES,
    TOPICS,
    plain,
    recipe_toml,
    toy_rows,
    write_chat_start,
    write_dev,
    write_gguf,
    write_rows,
    write_start,
)

LONGEST = 210
"""More tokens than a prompt has, and fewer than a prompt with its answer."""


def a_recipe(tmp_path: Path, encoder: dict[str, object] | None = None, **stage: object) -> Recipe:
    if not (tmp_path / "start").exists():
        write_chat_start(tmp_path / "start")
    rows = str(write_rows(tmp_path / "rows.jsonl", toy_rows()))
    settings = {"kind": "generate", "encoder": "writer", "data": {"files": [rows]}, "batch": 4, "steps": 6}
    settings |= {"lr": 5e-3, "tokens": 10_000, "checkpoint_every": 2}
    config = {"start": str(tmp_path / "start"), "max_length": 400} | (encoder or {})
    whole = {"about": "toy", "space": "toy", "dim": 32, "encoders": {"writer": config}}
    return Recipe.model_validate(whole | {"stages": {"write": settings | stage}})


def a_stage(tmp_path: Path, recipe: Recipe, ranks: Ranks = ONE) -> GenerateStage:
    stage: Any = recipe.stages["write"]
    return GenerateStage(EncoderStore(recipe, tmp_path, ranks), stage, [tmp_path / "rows.jsonl"], tmp_path / "texts")


def gradients(work: GenerateStage, step: int = 0) -> dict[str, torch.Tensor]:
    (module,) = work.modules.values()
    module.zero_grad()
    work.gradients(step, lambda loss: loss)
    return {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("max_length", [400, LONGEST])
def test_the_loss_counts_only_the_tokens_of_the_answer(tmp_path: Path, max_length: int) -> None:
    work = a_stage(tmp_path, a_recipe(tmp_path, {"max_length": max_length}, batch=12))
    facts = work.gradients(0, lambda loss: loss)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    total, count = 0.0, 0
    for query, topic in zip(QUERIES, TOPICS, strict=True):
        asked = [{"role": "user", "content": fill(load(BLIND, "zh"), query=query)}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt, answer = (
            tokenizer(part, add_special_tokens=False).input_ids for part in (text, f"{topic}治疗<|im_end|>")
        )
        assert len(prompt) < LONGEST < len(prompt) + len(answer) < 400, "the second case truncates answers"
        ids = torch.tensor([(prompt + answer)[:max_length]])
        with torch.no_grad():
            scores = model(ids).logits[0, len(prompt) - 1 : -1]
        wanted = ids[0, len(prompt) :]
        total += float(functional.cross_entropy(scores, wanted, reduction="sum"))
        count += len(wanted)
    assert facts["loss"] == pytest.approx(total / count, rel=1e-4)
    assert facts["texts"] == 12


def test_chunks_and_ranks_give_the_gradient_of_the_batch(tmp_path: Path) -> None:
    whole = gradients(a_stage(tmp_path, a_recipe(tmp_path)))
    parts = gradients(a_stage(tmp_path, a_recipe(tmp_path, tokens=600)))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5)
    two = [gradients(a_stage(tmp_path, a_recipe(tmp_path), Alone(rank, 2))) for rank in range(2)]
    for name, value in whole.items():
        torch.testing.assert_close(two[0][name] + two[1][name], value, rtol=1e-3, atol=1e-5)


class Alone(Ranks):
    """One of several ranks, without the others: sums are its own part only."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, torch.device("cpu"))
        self.is_first = True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wait(self) -> None:
        pass


def test_the_model_learns_to_write_and_transformers_opens_the_folder(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, steps=60, batch=12, lr=1e-2)
    (folder,) = train(recipe, tmp_path / "run", ONE)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 4
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.use_cache, "otherwise generation would read the text again for every token"
    asked = [{"role": "user", "content": fill(load(BLIND, "zh"), query=QUERIES[0])}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    written = model.generate(**given, max_new_tokens=20, do_sample=False)[0, given.input_ids.shape[1] :]
    assert tokenizer.decode(written) == f"{TOPICS[0]}治疗<|im_end|>"


def test_development_sets_are_refused_for_a_generator(tmp_path: Path) -> None:
    write_dev(tmp_path / "dev")
    dev = Dev(folder=tmp_path / "dev", every=2)
    train(a_recipe(tmp_path).model_copy(update={"dev": dev}), tmp_path / "run", ONE)
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6
    assert not any("dev" in line for line in lines)


def test_a_stopped_run_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = a_recipe(tmp_path)
    (straight,) = train(recipe, tmp_path / "straight", ONE)
    real = GenerateStage.gradients

    def dies(self: GenerateStage, step: int, scale: Any) -> dict[str, float]:  # noqa: ANN401
        if step == 3:
            raise KeyboardInterrupt
        return real(self, step, scale)

    monkeypatch.setattr(GenerateStage, "gradients", dies)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "resumed", ONE)
    monkeypatch.setattr(GenerateStage, "gradients", real)
    (resumed,) = train(recipe, tmp_path / "resumed", ONE)
    name = "model.safetensors"
    assert (straight / name).read_bytes() == (resumed / name).read_bytes()
    assert (straight / name).read_bytes() != (tmp_path / "start" / name).read_bytes()


def test_lora_is_merged_and_its_adapter_is_saved_beside(tmp_path: Path) -> None:
    lora = {"lora": {"rank": 2, "alpha": 4}, "dtype": "bf16"}
    recipe = a_recipe(tmp_path, lora, steps=3, lr=1e-2)
    (folder,) = train(recipe, tmp_path / "run", ONE)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    ids = torch.arange(4, 14)[None]
    with torch.no_grad():
        before = start(ids).logits
        adapted = PeftModel.from_pretrained(start, tmp_path / "run/write/writer-adapter")
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, before, atol=1e-3)


def test_a_gguf_file_keeps_its_head_and_its_chat_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", chat_template="{{ messages[0]['content'] }}")
    folder = unpack_gguf(tmp_path / "model.gguf", tmp_path / "folder", writes=True)
    generator = TorchGenerator.load(folder, 32)
    assert generator.chat("的") == "的"
    assert generator.end == "<|endoftext|>"
    generator.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<turn>\n{% endfor %}"
    assert generator.end == "<turn>", "the template defines the end of a turn, whatever the file calls its end"
    expected = write_gguf(tmp_path / "again.gguf").backbone.get_input_embeddings().weight
    torch.testing.assert_close(generator.vocabulary, expected)


def test_files_of_later_stages_are_needed_only_after_the_generator_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_start(tmp_path / "bert", "bert")
    recipe = a_recipe(tmp_path, steps=1)
    later = str(tmp_path / "later.jsonl")
    encoders = {**recipe.encoders, "both": {"start": str(tmp_path / "bert"), "pooling": "cls", "max_length": 40}}
    mine = {"kind": "mine", "query": "both", "files": [later], "count": 1}
    how = {later: f"care curate dedup {tmp_path / 'rows.jsonl'} --near 0"}
    values = recipe.model_dump() | {"encoders": encoders, "files": how}
    recipe = Recipe.model_validate(values | {"stages": {**recipe.model_dump()["stages"], "mine": mine}})
    make(recipe, tmp_path / "run")
    assert not Path(later).exists(), "the tuned generator writes it"
    with pytest.raises(BadData, match=r"stages\.mine: .*later.* care curate dedup .* --out "):
        train(recipe, tmp_path / "run", ONE)
    assert (tmp_path / "run/write/done.json").is_file()
    make(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run", ONE)
    assert (tmp_path / "run/mine/pairs.jsonl").is_file()


def test_the_plan_counts_prompt_answer_and_head(tmp_path: Path) -> None:
    text = plan(a_recipe(tmp_path), tflops=1)
    assert "cross-entropy of the answer's tokens" in text
    assert "about 12 rows" in text
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_toml(a_recipe(tmp_path)), encoding="utf-8")
    assert Recipe.load(path) == a_recipe(tmp_path)


def test_sources_are_left_out_and_weighed(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "two.jsonl", [*toy_rows(), *plain(toy_rows("other"))]))
    data = {"files": [rows], "without": ["other"], "weights": {"toy": 1.0, "other": 2.0, "gone": 0.0}}
    stage: Any = (recipe := a_recipe(tmp_path, data=data)).stages["write"]
    work = GenerateStage(EncoderStore(recipe, tmp_path, ONE), stage, [Path(rows)], tmp_path / "texts")
    assert work.steps == 6
    recipe = a_recipe(tmp_path, data={"files": [rows], "weights": {"gone": 1.0}})
    write_rows(tmp_path / "rows.jsonl", toy_rows())
    with pytest.raises(BadData, match="no row is of 'gone'"):
        a_stage(tmp_path, recipe)


def test_incompatible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="leaves no room"):
        a_stage(tmp_path, a_recipe(tmp_path, {"max_length": 40}))
    recipe = a_recipe(tmp_path)
    write_rows(tmp_path / "rows.jsonl", plain(toy_rows()))
    with pytest.raises(BadData, match="hypothetical"):
        a_stage(tmp_path, recipe)
    with pytest.raises(ValueError, match="leave projection out"):
        a_recipe(tmp_path, {"projection": 16})
    values = recipe.model_dump()
    values["stages"]["mine"] = {"kind": "mine", "query": "writer", "files": ["@x"], "skip": True}
    with pytest.raises(ValueError, match="becomes a generator"):
        Recipe.model_validate(values)
    write_start(tmp_path / "bert", "bert")
    with pytest.raises(BadEncoder, match="does not write texts"):
        TorchGenerator.load(tmp_path / "bert", 40)
    write_start(tmp_path / "qwen3", "qwen3")
    with pytest.raises(BadEncoder, match="no chat template"):
        TorchGenerator.load(tmp_path / "qwen3", 40)

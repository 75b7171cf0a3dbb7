"""Rerank stages: lists and pairs of the loss, chunks, resuming, and learning."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from models.encoder.pairs import PairTokenizer, RerankerSpec
from models.encoder.spec import Side
from models.encoder.tokenizer import Tokenizer, pad
from models.encoder.torch_reranker import TorchReranker
from models.errors import BadData, BadEncoder
from models.training.batches import BatchDealer
from models.training.encoders import EncoderStore
from models.training.passes import TokenTable
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.rerank import NONE, RerankStage, draw_lists, join
from models.training.rows import Pair
from models.training.run import train
from models.training.stages import Rerank
from models.training.tables import PairTable
from tests.support.toy_training import (
    DOCUMENTS,
    ONE,
    QUERIES,
    plain,
    recipe_toml,
    toy_rows,
    write_dev,
    write_rows,
    write_start,
)

CPU = torch.device("cpu")
Make = Callable[..., Recipe]


def a_recipe(tmp_path: Path, make: Make, extra: dict[str, object] | None = None, **stage: object) -> Recipe:
    """Makes a recipe with a bert that becomes a reranker, and a frozen qwen3 that may teach it."""
    make()  # writes the starts and the rows
    settings = {
        "kind": "rerank",
        "encoder": "query",
        "data": {"files": [str(tmp_path / "rows.jsonl")], "negatives": 2},
        "batch": 4,
        "steps": 6,
        "lr": 2e-3,
        "tokens": 10_000,
        "checkpoint_every": 2,
    }
    return make(extra={"stages": {"rank": settings | stage}} | (extra or {}))


def a_stage(tmp_path: Path, recipe: Recipe, ranks: Ranks = ONE) -> RerankStage:
    stage: Any = recipe.stages["rank"]
    return RerankStage(EncoderStore(recipe, tmp_path, ranks), stage, [tmp_path / "rows.jsonl"], tmp_path / "texts")


def a_table() -> PairTable:
    """The first query has two answers in two rows; the last has no negatives of its own."""
    pairs = [
        Pair("甲", ["一"], ["三", "二", "四"], "s"),
        Pair("甲", ["二"], [], "s"),
        Pair("乙", ["三"], ["一"], "s"),
        Pair("丙", ["四"], [], "s"),
    ]
    return PairTable.of_pairs(pairs)


def test_a_list_is_the_positive_its_negatives_and_positives_of_others() -> None:
    table = a_table()
    batch = BatchDealer(table, {}, size=4, steps=1, negatives=3, seed=0).deal(0)
    lists = draw_lists(batch, table.answers, 4, np.random.default_rng(0))
    texts = [[table.documents.texts[row] if row != NONE else "" for row in of_query] for of_query in lists.tolist()]
    found = {(table.queries.texts[query], of[0]): of[1:] for query, of in zip(batch.queries, texts, strict=True)}
    # "二" was given as a negative of a query that another row answers with it.
    assert sorted(found["甲", "一"]) == ["", "三", "四"]
    assert sorted(found["甲", "二"]) == ["", "三", "四"]
    assert found["乙", "三"][0] == "一"
    assert sorted(found["乙", "三"]) == ["一", "二", "四"]
    assert sorted(found["丙", "四"]) == ["一", "三", "二"]
    assert len(draw_lists(batch, table.answers, 2, np.random.default_rng(0))[0]) == 2


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta"])
def test_pairs_on_the_device_equal_those_of_the_tokenizer(tmp_path: Path, architecture: str) -> None:
    reranker = TorchReranker.start(write_start(tmp_path / "start", architecture), 24)
    texts = [*QUERIES[:3], QUERIES[0] * 5, "痛"]
    documents = [*DOCUMENTS[:3], "痛", DOCUMENTS[0] * 3]
    table = PairTable.of_pairs([Pair(q, [d], [], "s") for q, d in zip(texts, documents, strict=True)])
    asked, found = (
        TokenTable.build(side, None, Tokenizer.from_json(reranker.tokenizer_json, cut), ONE)
        for side, cut in ((table.queries, 12), (table.documents, 24))
    )
    every = [(q, d) for q in range(5) for d in range(5)]
    ids, mask = join(asked, found, np.array([q for q, _ in every]), np.array([d for _, d in every]), reranker)
    pairs = [
        reranker.tokenizer.join(reranker.tokenizer.query(texts[q]), reranker.tokenizer.documents([documents[d]])[0])
        for q, d in every
    ]
    expected_ids, expected_mask = pad(pairs)
    assert ids.numpy().tolist() == expected_ids.tolist()
    assert mask.numpy().tolist() == expected_mask.tolist()
    assert max(len(pair) for pair in pairs) == 24
    assert any(pair.truncated for pair in pairs)


def test_a_query_keeps_half_of_the_tokens_and_the_document_the_rest(tmp_path: Path) -> None:
    reranker = TorchReranker.start(write_start(tmp_path / "start", "bert"), 10)
    (pair,) = reranker.tokenizer.pairs(QUERIES[0] * 4, [DOCUMENTS[0] * 4])
    asked, (found,) = reranker.tokenizer.query(QUERIES[0] * 4), reranker.tokenizer.documents([DOCUMENTS[0] * 4])
    assert len(asked) == 5
    assert pair.ids == [*asked.ids, *found.ids[1:5], reranker.separator]
    assert pair.truncated


def test_a_tokenizer_without_special_tokens_is_refused() -> None:
    from tests.support.toy_training import toy_tokenizer

    spec = RerankerSpec(architecture="bert", max_length=16, separators=1)
    with pytest.raises(BadEncoder, match="begin and end"):
        PairTokenizer(toy_tokenizer(bare=True).to_str(), spec)


def test_the_loss_equals_a_plain_loop(tmp_path: Path, toy_recipe: Make) -> None:
    loss = {"cross_entropy": 0.7, "distil": 0.4, "teacher": "document", "teacher_temperature": 0.1}
    work = a_stage(tmp_path, a_recipe(tmp_path, toy_recipe, loss=loss))
    (reranker,) = work.modules.values()
    assert isinstance(reranker, TorchReranker)
    reranker.eval()
    facts = work.gradients(0, lambda loss: loss)
    table, batch = work._table, work._dealer.deal(0)
    lists = draw_lists(batch, table.answers, 3, np.random.default_rng([0, 3, 0]))
    store = EncoderStore(work._store.recipe, tmp_path, ONE)
    teacher = store.open("document", trained=False)
    total, divergence = 0.0, 0.0
    for query, of_query in zip(batch.queries, lists, strict=True):
        text, documents = table.queries.texts[int(query)], [table.documents.texts[int(row)] for row in of_query]
        scores = torch.from_numpy(reranker.score(reranker.tokenizer.pairs(text, documents)))
        total += float(-functional.log_softmax(scores, 0)[0])
        cosines = teacher.encode(documents, Side.DOCUMENT) @ teacher.encode([text], Side.QUERY)[0]
        target = torch.softmax(torch.from_numpy(cosines) / 0.1, 0)
        divergence += float((target * (target.log() - functional.log_softmax(scores, 0))).sum())
    assert facts["cross_entropy"] == pytest.approx(total / 4, rel=1e-4)
    assert facts["distil"] == pytest.approx(divergence / 4, rel=1e-2)  # kept vectors are float16
    assert facts["loss"] == pytest.approx(0.7 * facts["cross_entropy"] + 0.4 * facts["distil"], rel=1e-5)


def test_gradients_do_not_depend_on_the_tokens_of_a_group_or_on_the_ranks(tmp_path: Path, toy_recipe: Make) -> None:
    found = []
    for tokens, ranks in ((10_000, [ONE]), (60, [ONE]), (10_000, [Ranks(0, 1, CPU), Ranks(0, 1, CPU)])):
        work = a_stage(tmp_path, a_recipe(tmp_path, toy_recipe, tokens=tokens))
        work._reranker.eval()
        for place, rank in enumerate(ranks):
            if len(ranks) > 1:  # as two processes do: each has its share of the lists, gradients are added up
                rank.share = lambda count, first=place: np.arange(first, count, 2)  # type: ignore[method-assign,misc]
            work._ranks = rank
            work.gradients(0, lambda loss: loss)
        found.append(
            {name: value.grad.clone() for name, value in work._reranker.named_parameters() if value.grad is not None}
        )
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, found[0][name], rtol=1e-3, atol=1e-6)


def test_a_reranker_learns_its_lists_and_is_evaluated(
    tmp_path: Path, toy_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dev(tmp_path / "dev")
    write_start(tmp_path / "query", "bert")  # one layer would not learn it in as many steps
    encoders = a_recipe(tmp_path, toy_recipe).model_dump()["encoders"]
    encoders["query"]["dropout"] = 0.0
    extra = {"dev": {"folder": str(tmp_path / "dev"), "every": 20}, "encoders": encoders}
    settings = {"steps": 60, "batch": 12, "lr": 3e-4, "first": "document", "depth": 12}
    (folder,) = train(a_recipe(tmp_path, toy_recipe, extra, **settings), tmp_path / "run", ONE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses, figures = ([line[key] for line in lines if key in line] for key in ("loss", "dev"))
    assert losses[-1] < losses[0] - 0.5
    assert len(figures) == 3
    assert "document alone: nDCG@10" in capsys.readouterr().err
    reranker = TorchReranker.load(folder)
    scores = [reranker.score(reranker.tokenizer.pairs(query, DOCUMENTS)) for query in QUERIES]
    assert np.mean([of_query.argmax() == row for row, of_query in enumerate(scores)]) > 0.5


def test_a_stopped_stage_ends_with_the_same_weights(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = a_recipe(tmp_path, toy_recipe)
    (whole,) = train(recipe, tmp_path / "whole", ONE)
    train(recipe.model_copy(update={"max_steps": 2}), tmp_path / "cut", ONE)
    # As a kill after the second step leaves it: a checkpoint, and no results.
    work = a_stage(tmp_path, recipe)
    from models.training import loop

    stage: Any = recipe.stages["rank"]
    optimiser = loop.make_optimiser(work.modules, stage)
    for step in range(2):
        share = loop.schedule(step, 6, stage.warmup, stage.schedule)
        loop._step(work, stage.clip, step, share, optimiser, torch.amp.GradScaler("cpu", enabled=False), ONE)
    loop.save(tmp_path / "again" / "rank" / loop.CHECKPOINT, work.modules, optimiser, loop.Progress(step=2))
    (resumed,) = train(recipe, tmp_path / "again", ONE)
    first, second = (TorchReranker.load(folder).state_dict() for folder in (whole, resumed))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"distil": 1.0}}, "distil needs a teacher"),
        ({"loss": {"cross_entropy": 0.0}}, "every term has weight 0"),
        ({"loss": {"distil": 1.0, "teacher": "query"}}, "copy_of"),
        ({"first": "query"}, "copy_of"),
        ({"encoder": "nobody"}, "no encoder is called 'nobody'"),
    ],
)
def test_incompatible_settings_are_refused(
    tmp_path: Path, toy_recipe: Make, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        a_recipe(tmp_path, toy_recipe, **changes)


def test_a_decoder_and_adapters_are_refused(tmp_path: Path, toy_recipe: Make) -> None:
    with pytest.raises(BadEncoder, match="qwen3 is not supported as a reranker, only bert"):
        train(a_recipe(tmp_path, toy_recipe, encoder="document"), tmp_path / "run", ONE)
    recipe = a_recipe(tmp_path, toy_recipe)
    lora = {"encoders": {**recipe.model_dump()["encoders"]}}
    lora["encoders"]["query"]["lora"] = {"rank": 2, "alpha": 4}
    with pytest.raises(ValueError, match="trained whole"):
        a_recipe(tmp_path, toy_recipe, lora)


def test_a_mined_sample_leaves_rows_out_and_the_plan_counts_pairs(tmp_path: Path, toy_recipe: Make) -> None:
    from models.training.plan import plan

    rows = write_rows(tmp_path / "many.jsonl", [*plain(toy_rows("a")), *plain(toy_rows("b"))])
    mine = {"kind": "mine", "query": "document", "files": [str(rows)], "count": 2, "ranks": [0, 6],
            "sample": {"a": 0.5}, "halves": {"b": 0.5}}  # fmt: skip
    stage = a_recipe(tmp_path, toy_recipe).stages["rank"].model_dump() | {"data": {"files": ["@mine"], "negatives": 2}}
    recipe = toy_recipe(extra={"stages": {"mine": mine, "rank": stage}})
    train(recipe, tmp_path / "run", ONE)
    lines = (tmp_path / "run" / "mine" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [json.loads(line) for line in lines]
    sources = [row["source"] for row in kept]
    assert sources.count("b") == 12
    assert 0 < sources.count("a") < 12
    halved = [row for row in kept if row["query"] not in QUERIES]
    assert 0 < len(halved) < 12
    assert all(row["source"] == "b" for row in halved)
    for row in halved:  # a part of a document is the query for the rest of it
        assert any(row["query"] in document and row["pos"][0] in document for document in DOCUMENTS)
        assert row["pos"][0] not in DOCUMENTS
    text = plan(recipe, tflops=1.0)
    assert "1 x cross-entropy, lists of 3" in text
    again = Recipe.load(write_toml(tmp_path / "recipe.toml", recipe))
    assert again == recipe


def write_toml(path: Path, recipe: Recipe) -> Path:
    path.write_text(recipe_toml(recipe), encoding="utf-8")
    return path


def test_rows_without_negatives_are_refused(tmp_path: Path, toy_recipe: Make) -> None:
    bare = [{key: value for key, value in row.items() if key in ("query", "pos")} for row in toy_rows()]
    recipe = a_recipe(tmp_path, toy_recipe)
    write_rows(tmp_path / "rows.jsonl", bare)
    with pytest.raises(BadData, match="mine some"):
        train(recipe, tmp_path / "run", ONE)


def test_a_stage_without_negatives_is_refused() -> None:
    whole = {"kind": "rerank", "encoder": "e", "data": {"files": ["x"]}, "batch": 4, "steps": 1, "lr": 1e-3}
    with pytest.raises(ValidationError, match=r"data\.negatives is 0: .* set it to 1 or more"):
        Rerank.model_validate(whole)

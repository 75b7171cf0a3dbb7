"""RetroMAE: what the decoder may see, that it learns, and that chunks do not change the result."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.encoder.torch import TorchEncoder
from models.errors import BadEncoder
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.reconstruct import Decoder, ReconstructStage, mask_id, visible_parts
from models.training.run import train
from tests.support.tiny_models import tiny_encoder
from tests.support.toy_training import ONE, toy_encoder

Make = Callable[..., Recipe]
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def a_recipe(tmp_path: Path, make: Make, **changes: object) -> Recipe:
    make()  # writes the starts and the rows
    stage = {
        "kind": "reconstruct",
        "encoder": "query",
        "data": {"files": [str(tmp_path / "rows.jsonl")]},
        "batch": 8,
        "steps": 30,
        "lr": 3e-3,
        "tokens": 400,
    }
    return make(extra={"stages": {"rebuild": stage | changes}})


def test_a_position_sees_the_embedding_and_some_others_but_not_itself_or_padding() -> None:
    seen = visible_parts(MASK, 0.5, torch.Generator().manual_seed(0))
    assert seen.shape == (2, 5, 5)
    assert seen[:, :, 0].all()
    assert not any(seen[text, place, place] for text in range(2) for place in range(1, 5))
    assert not seen[0, :, 4].any()
    all_of_them = visible_parts(MASK, 1.0, torch.Generator())
    assert all_of_them[1].sum() == 5 * 5 - 4
    assert 0.2 < visible_parts(torch.ones(8, 64), 0.5, torch.Generator()).float().mean() < 0.6


def test_the_decoder_depends_on_a_token_only_if_it_is_visible() -> None:
    torch.manual_seed(0)
    decoder = Decoder(64, 16).eval()
    embedding, words = torch.randn(1, 64), torch.randn(1, 5, 64)
    visible = torch.zeros(1, 5, 5, dtype=torch.bool)
    visible[:, :, 0] = True
    visible[:, 2, 3] = True
    changed = words.clone()
    changed[:, 3] += 1
    moved = (decoder(embedding, words, visible) - decoder(embedding, changed, visible)).abs().sum(-1)[0]
    assert moved[2] > 0
    assert moved[[0, 1, 3, 4]].sum() == 0
    assert (decoder(embedding, words, visible) - decoder(embedding + 1, words, visible)).abs().sum() > 0


def test_the_loss_falls_and_the_heads_are_not_saved(tmp_path: Path, toy_recipe: Make) -> None:
    (folder,) = train(a_recipe(tmp_path, toy_recipe), tmp_path / "run", ONE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[0]["loss"] == pytest.approx(lines[0]["encoder"] + lines[0]["decoder"])
    assert not any("decoder" in name for name in TorchEncoder.load(folder).state_dict())


def test_masks_differ_by_step_and_rank_for_any_number_of_ranks() -> None:
    cpu = torch.device("cpu")
    seeds = {Ranks(rank, 8, cpu).seed(seed, step) for seed in range(3) for step in range(50) for rank in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert Ranks(3, 8, cpu).seed(1, 7) == Ranks(3, 4, cpu).seed(1, 7)


def test_chunks_add_up_to_the_batch(tmp_path: Path, toy_recipe: Make) -> None:
    """Masks are drawn per chunk, so the same chunks are joined by hand."""
    from models.training.encoders import EncoderStore

    found = []
    for share in (0.0, 1.0):
        recipe = a_recipe(tmp_path, toy_recipe, tokens=60, encoder_mask=share, decoder_mask=0.0, steps=1)
        stage = recipe.stages["rebuild"]
        for tokens in (60, 10_000):
            work = ReconstructStage(
                EncoderStore(recipe, tmp_path, ONE),
                stage.model_copy(update={"tokens": tokens}),  # type: ignore[arg-type]
                [tmp_path / "rows.jsonl"],
                tmp_path / "texts",
            )
            for module in work.modules.values():
                module.eval()
            found.append(work.gradients(0, lambda loss: loss)["loss"])
    # Nothing is masked, or everything: then nothing is drawn.
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[2] == pytest.approx(found[3], rel=1e-4)


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    assert mask_id(toy_encoder("bert")) == toy_encoder("bert").backbone.config.vocab_size - 1
    with pytest.raises(BadEncoder, match="MASK"):
        mask_id(tiny_encoder("bert"))

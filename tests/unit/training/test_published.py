"""The paper's backbones, with their published widths and names, random weights and few layers.

Vocabulary, depth and the inside of Qwen's feed-forward layer are cut down; widths, heads, positions and file layout are
those of the checkpoints.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side, Variant
from models.export.parity import CHECK_TEXTS, FLOORS
from models.export.pipeline import Backend, export
from models.training.recipe import Recipe
from models.training.run import train
from models.training.shapes import SHAPES, made
from tests.support.tiny_models import write_new_checkpoint
from tests.support.toy_training import DOCUMENTS, ONE, QUERIES, plain, toy_rows, toy_tokenizer, write_rows

CARE = Path("models/training/recipes/care-0.3b-4b.toml").resolve()
SMALL = [
    "max_steps=1",
    "stages.*.batch=4",
    "stages.*.tokens=400",
    "stages.*.data.negatives=1",
    "encoders.*.max_length=32",
    # A CPU may lack bf16, and then takes minutes for these widths.
    "encoders.*.dtype=fp32",
    *(f"stages.{stage}.skip=true" for stage in ("retromae", "unsupervised", "query", "document", "align")),
]


def write_gte(folder: Path) -> None:
    tokenizer = toy_tokenizer()
    shape = {"num_hidden_layers": 2, "vocab_size": tokenizer.get_vocab_size(), "pad_token_id": 1}
    config = made(SHAPES["gte-multilingual-base"] | shape)
    config.type_vocab_size, config.attention_probs_dropout_prob = 1, 0.0
    write_new_checkpoint(folder, config, tokenizer, theta=20_000)


def write_qwen(folder: Path) -> None:
    tokenizer = toy_tokenizer(bare=True)
    shape = {"num_hidden_layers": 1, "intermediate_size": 1024, "vocab_size": tokenizer.get_vocab_size()}
    config = made(SHAPES["qwen3-4b"] | shape)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config.tie_word_embeddings, config.eos_token_id = True, 3
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_papers_pair_trains_exports_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A third, of every length: all of them would take most of a minute. test_export_pipeline.py compares all.
    for module in ("parity", "pipeline"):
        monkeypatch.setattr(f"models.export.{module}.CHECK_TEXTS", CHECK_TEXTS[::3])
    write_gte(Path("data/weights/gte-multilingual-base"))
    write_qwen(Path("data/weights/Qwen3-4B"))
    write_rows(Path("data/finetune.jsonl"), plain(toy_rows())[:4])
    recipe = Recipe.load(CARE, SMALL)
    document, query = sorted(train(recipe, Path("run"), ONE))
    for folder in (query, document):
        floors = {Variant.FP32: FLOORS[Variant.FP32]}
        export(folder, Path("served", folder.name), variants=[Variant.FP32], backend=Backend.TORCH, floors=floors)
    asking, answering = (OnnxEncoder.load(Path("served", name), threads=1) for name in ("query", "document"))
    assert (asking.spec.native_dim, answering.spec.native_dim) == (768, 2560)
    assert asking.spec.dim == answering.spec.dim == 768
    corpus = write_rows(Path("corpus.jsonl"), [{"_id": f"d{n}", "text": text} for n, text in enumerate(DOCUMENTS)])
    snapshot = Snapshot.open(
        build([corpus], answering, Collection(tmp_path / "collection"), BuildOptions(overlap=4)).folder
    )
    _, rows = snapshot.vectors.search(asking.encode(QUERIES, Side.QUERY), k=3)
    assert rows.shape == (len(QUERIES), 3)

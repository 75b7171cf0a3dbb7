"""The benchmark of LLM encoding: its count of work, and that every step runs without a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.bench.encode import main
from models.bench.measure import beginnings, cosines
from models.bench.shapes import MAX_LENGTH, SHAPES, TINY
from models.encoder.packed.attention import BACKENDS
from models.encoder.packed.encoder import PackedModel
from models.encoder.packed.kernels import pack
from models.encoder.packed.weights import read_weights
from models.encoder.tokenizer import Tokens
from tests.support.packed import CPU
from tests.support.tiny_models import tiny_encoder

BUNDLED = "models/pretrained/care-small-zh"


def _addmm(residual: torch.Size, one: torch.Size, two: torch.Size, **_: object) -> int:
    return 2 * one[0] * one[1] * two[1]


def test_the_counted_work_equals_the_products_of_the_pass() -> None:
    shape = TINY["4b"]
    lengths = [64, 50, 14]  # whole tiles: no filler
    model = shape.build(CPU, torch.float32)
    batch = pack([Tokens([7] * length, False) for length in lengths], CPU)
    decoder = PackedModel(read_weights(model, MAX_LENGTH, CPU), BACKENDS["padded"])
    # The counter does not support products that add in place.
    counted = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm})
    with counted as counter:
        decoder(batch)
    sizes = ("num_hidden_layers", "num_attention_heads", "head_dim")
    attention = 4 * math.prod(shape.sizes[name] for name in sizes)
    causal = attention * sum(length * (length + 1) // 2 for length in lengths)
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counts.items() if "mm" in str(operation))
    assert shape.flops(lengths) == products + causal


def test_model_shapes_have_the_published_sizes() -> None:
    for name, billions in (("4b", 4.02), ("8b", 7.57)):
        shape = SHAPES[name]
        layer = sum(rows * columns for rows, columns in shape.matrices().values())
        parameters = shape.sizes["num_hidden_layers"] * layer + shape.sizes["vocab_size"] * shape.sizes["hidden_size"]
        assert parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_dry_run_writes_its_figures_and_appends_to_them(tmp_path: Path) -> None:
    tiny_encoder("qwen3").save(tmp_path / "real")
    words = ["--tiny", "--corpus", "examples/corpus.jsonl", "--tokenizer", BUNDLED, "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="the ceiling is not known yet"):
        main([*words, "--only", "4b"])
    assert main([*words, "--only", "ceiling,4b,fp8,products", "--rounds", "1", "--real", str(tmp_path / "real")]) == 0
    assert main([*words, "--only", "4b", "--rounds", "1"]) == 0
    figures = json.loads((tmp_path / "encode.json").read_text())
    assert list(figures["length"]["tiny (4b)"]["runs"]) == ["bf16", "fp8"]
    assert figures["length"]["tiny (4b)"]["runs"]["bf16"]["docs_per_second"] > 0
    assert figures["length"]["tiny (4b)"]["runs"]["fp8"]["cosine_mean"] > 0.9
    assert set(figures["products"]["tiny (4b)"]) == {"qkv", "out", "up", "down"}
    assert "| fp8 |" in (tmp_path / "encode.md").read_text()
    assert "| fp8 to bf16, beginnings |" in (tmp_path / "encode.md").read_text()


def test_cosines_report_the_worst_text_and_count_those_below_the_threshold() -> None:
    one, two = np.eye(2)[[0, 0, 1, 1]], np.eye(2)[[0, 0, 0, 1]]
    found = cosines(one, two, ["甲", "乙", "丙", "丁"])
    assert (found["worst"], found["least"], found["below"], found["mean"]) == ("丙", 0, 0.25, 0.75)
    assert beginnings(["感冒发热", "感冒咳嗽三天", "感冒"]) == ["感冒", "感冒咳"]

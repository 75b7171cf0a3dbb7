"""The benchmark beside vLLM, with a stand-in for vLLM: it gets the tokens that our encoder reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.bench.vllm import main
from models.encoder.spec import EncoderSpec, Side
from models.encoder.tokenizer import open_tokenizer

ENCODER = Path("models/pretrained/care-small-zh")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class LLM:
        def __init__(self, model: str, **settings: object) -> None:
            config = Path(model) / "config.json"
            made.append((model, settings, json.loads(config.read_text()) if config.is_file() else None))

        def embed(self, prompts: list[list[int]], **_: object) -> list[SimpleNamespace]:
            made.append(prompts)
            return [SimpleNamespace(outputs=SimpleNamespace(embedding=[float(len(prompt)), 1.0])) for prompt in prompts]

    module = ModuleType("vllm")
    module.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return made


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = ["咳嗽三天", "高血压的诊断标准" * 200]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def test_vllm_gets_the_tokens_of_our_encoder(
    calls: list[Any], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "vectors.npy"
    sizes = ["--documents", "2", "--rounds", "2", "--save", str(saved)]
    assert main(["some-model", str(ENCODER), "--corpus", str(corpus), *sizes]) == 0
    (model, settings, _), *read = calls
    assert (model, settings["runner"]) == ("some-model", "pooling")
    assert "skip_tokenizer_init" not in settings  # vLLM 0.26 refuses a pooling model without a tokenizer
    spec = EncoderSpec.load(ENCODER)
    tokenizer, prefix = open_tokenizer(ENCODER, spec), spec.instruction(Side.DOCUMENT)
    expected = sorted(
        list(tokenizer(prefix + json.loads(line)["text"]).ids)
        for line in corpus.read_text(encoding="utf-8").splitlines()
    )
    assert [sorted(prompts) for prompts in read] == [expected] * 3
    assert np.load(saved).tolist() == [[len(prompt), 1] for prompt in read[-1]]
    assert "documents/s, 2 documents of" in capsys.readouterr().out


def test_a_model_shape_is_opened_with_random_weights(calls: list[Any], corpus: Path) -> None:
    assert main(["4b", str(ENCODER), "--corpus", str(corpus), "--documents", "2", "--rounds", "1"]) == 0
    _, settings, config = calls[0]
    assert (settings["load_format"], config["architectures"], config["hidden_size"]) == ("dummy", ["Qwen3Model"], 2560)
    assert settings["tokenizer"] == str(ENCODER)

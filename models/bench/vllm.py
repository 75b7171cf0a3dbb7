"""Measures documents per second of vLLM, in an environment that has it, on the tokens that our encoder would read.

  python -m models.bench.vllm CHECKPOINT ENCODER --corpus corpus.jsonl.gz
  python -m models.bench.vllm 4b TOKENIZER --corpus corpus.jsonl.gz

The first takes the weights of a published folder and the tokens of the encoder that was imported from it; the second
a shape of models.bench.encode with random weights. Tokenising is left out of the time, which favours vLLM.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from models.bench.shapes import MAX_LENGTH, SHAPES, load_texts, spread, tokenizer_of
from models.encoder.spec import SPEC_FILE, EncoderSpec, Side
from models.encoder.tokenizer import Tokenizer, open_tokenizer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a published folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("tokens", type=Path, help="our encoder folder, or for a shape any folder with a tokenizer")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with texts, .gz too")
    parser.add_argument("--documents", type=int, default=4096, help="how many of them (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that they are read (%(default)s)")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory, free now (%(default)s)")
    parser.add_argument("--save", type=Path, help="a .npy file for the vectors")
    options = parser.parse_args(arguments)
    prompts = _tokens(options.tokens, load_texts(options.corpus, options.documents))
    with ExitStack() as stack:
        llm = _open(options.model, options.tokens, options.memory, stack)
        llm.embed(prompts, use_tqdm=False)  # compiled for every shape that comes
        rates = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            outputs = llm.embed(prompts, use_tqdm=False)
            rates.append(len(prompts) / (time.perf_counter() - start))
    if options.save:
        np.save(options.save, np.array([output.outputs.embedding for output in outputs], dtype=np.float32))
    tokens = sum(map(len, prompts)) / len(prompts)
    print(f"vLLM, {options.model}: {spread(rates)} documents/s, {len(prompts)} documents of {tokens:.0f} tokens")
    return 0


def _tokens(folder: Path, texts: list[str]) -> list[list[int]]:
    if (folder / SPEC_FILE).is_file():
        spec = EncoderSpec.load(folder)
        instruction, tokenizer = spec.instruction(Side.DOCUMENT), open_tokenizer(folder, spec)
    else:
        instruction, tokenizer = "", Tokenizer.from_json(tokenizer_of(folder), MAX_LENGTH)
    return [[int(one) for one in tokens.ids] for tokens in tokenizer.batch([instruction + text for text in texts])]


def _open(model: str, tokens: Path, memory: float, stack: ExitStack) -> Any:  # noqa: ANN401 - vLLM is not among our packages
    from vllm import LLM

    settings: dict[str, Any] = {"runner": "pooling", "dtype": "bfloat16", "max_model_len": MAX_LENGTH,
                                "enable_prefix_caching": False, "gpu_memory_utilization": memory}  # fmt: skip
    if model not in SHAPES:
        return LLM(model, **settings)
    # A pooling model opens a tokenizer even where it is given tokens.
    settings["tokenizer"] = str(tokens)
    folder = stack.enter_context(TemporaryDirectory(prefix="care-vllm-"))
    config = SHAPES[model].config()
    config.architectures = ["Qwen3Model"]
    config.save_pretrained(folder)
    return LLM(folder, load_format="dummy", **settings)


if __name__ == "__main__":
    sys.exit(main())

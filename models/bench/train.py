"""Measures speed and memory of training at the papers' sizes, with random weights, beside sentence-transformers.

  python -m models.bench.train                              on a GPU (make bench-train)
  python -m models.bench.train --parts stage-1 lora         some of it
  python -m models.bench.train --tiny                       shapes that a CPU can afford: does it run?
  python -m models.bench.train --lengths CORPUS.jsonl.gz    text lengths as in this corpus, in characters

stage-1   a 0.3B query encoder against the cached vectors of a frozen 4B; the caching pass is reported by itself
lora      the 4B document encoder, LoRA, batch 640 at 512 tokens through gradient caching
peer      the 0.3B encoder at a batch that needs no caching, by our loop and by sentence-transformers' trainer: the same
          folder, texts, batch, precision and loss

Texts are made of characters that are one token each. The share is that of the GPU's own matrix product (bf16, 8192
cubed, measured first), counting only the operations that a step needs: 6 a weight and token, 4 under LoRA, padding
included. Where transformers has no Gte, a BERT of the same size stands in, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModel

from models.bench.shapes import TINY_SIZES, ceiling
from models.export.synthetic import SPECIAL, save_tokenizer, vocabulary_of
from models.rows import read_all, read_lines
from models.training import loop
from models.training.contrast import ContrastStage
from models.training.encoders import EncoderStore
from models.training.monitor import read_log
from models.training.passes import TokenTable
from models.training.plan import cost_of
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.shapes import SHAPES, made
from models.training.stages import Contrast
from models.training.vectors import read_once
from models.training.work import read_table

PAPER_PAIRS_PER_SECOND = 7.4
PARTS = ("stage-1", "lora", "peer")


@dataclass(frozen=True)
class Sizes:
    """How much of each part is done."""

    dim: int
    texts: int
    align_batch: int
    lora_batch: int
    lora_tokens: int
    peer_batch: int
    steps: int
    words: int
    longest: int
    precision: str


FULL = Sizes(768, 10240, 2560, 640, 512, 256, 8, 30000, 500, "bf16")
# Many CPUs compute bf16 slowly.
TINY = Sizes(32, 64, 16, 8, 32, 8, 3, 600, 32, "fp32")


class Bench:
    """Makes weights and texts in a folder, and runs stages on them."""

    def __init__(self, folder: Path, sizes: Sizes, *, tiny: bool, lengths: Path | None) -> None:
        self.folder, self.sizes, self._tiny = folder, sizes, tiny
        self.ranks = Ranks.join()
        device = self.ranks.device
        on_gpu = device.type == "cuda"
        print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}", flush=True)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.ceiling = ceiling(device, dtype, (8192,) if on_gpu else (256,))["bf16_best"]
        self.vocabulary = vocabulary_of(sizes.words)
        self._chance = np.random.default_rng(0)
        drawn = _lengths(lengths) if lengths else self._chance.lognormal(4.6, 0.7, 4096)
        self._lengths = np.clip(drawn, 8, sizes.longest)

    def weights(self, name: str) -> Path:
        """Returns a folder of random weights in a published shape, written once."""
        home = self.folder / "weights" / name
        if not home.is_dir():
            torch.manual_seed(0)
            shape = SHAPES[name]
            if self._tiny:
                shape = shape | {key: value for key, value in TINY_SIZES.items() if key in shape} | {"vocab_size": 2000}
            if shape["model_type"] not in CONFIG_MAPPING:
                print(f"{name}: this transformers has no {shape['model_type']}; a BERT of its size stands in")
                shape = shape | {"model_type": "bert"}
            with torch.device(self.ranks.device):
                backbone = AutoModel.from_config(made(shape), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
            backbone.save_pretrained(home)
            save_tokenizer(self.vocabulary, home / "tokenizer.json")
        return home

    def rows(self, name: str, count: int, tokens: int | None = None) -> Path:
        """Pairs of two texts of the corpus's lengths, or of `tokens` words, each of which is one token."""
        path = self.folder / f"{name}.jsonl"
        words = self.vocabulary[len(SPECIAL) :]
        sizes = self._chance.choice(self._lengths, (count, 2)).astype(int) if tokens is None else None
        with path.open("w", encoding="utf-8") as file:
            for row in range(count):
                pair = sizes[row] if sizes is not None else (tokens, tokens)
                query, document = (" ".join(self._chance.choice(words, size)) for size in pair)
                print(json.dumps({"query": query, "pos": [document]}), file=file)
        return path

    def run(self, name: str, recipe: Recipe, file: Path) -> None:
        """Runs the recipe's only stage and prints what the log says of its steps after the first."""
        stage = recipe.stages["bench"]
        assert isinstance(stage, Contrast)
        if self.ranks.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.cuda.reset_peak_memory_stats()
        store = EncoderStore(recipe, self.folder, self.ranks)
        work = ContrastStage(store, stage, [file], self.folder / "texts")
        home = self.folder / name
        home.mkdir()
        loop.run(work, stage, "bench", home, self.ranks, None)
        lines = read_log(home)["bench"]
        first, last = lines[0], lines[-1]
        seconds = last["seconds"] - first["seconds"]
        steps = last["step"] - first["step"]
        texts, tokens = (last[f"{unit}_per_second"] * last["seconds"] for unit in ("texts", "tokens"))
        share = steps / last["step"]
        per_token = sum(
            (4 if recipe.encoders[n].lora else 6) * cost.body for n in stage.train if (cost := cost_of(recipe, n))
        )
        speed = tokens * share / seconds
        print(
            f"{name}: {texts * share / seconds / 2:,.1f} pairs/s, {speed:,.0f} tokens/s, "
            f"{100 * speed * per_token / 1e12 / self.ceiling:.0f} % of the ceiling, peak {last['memory_gib']:.1f} GiB, "
            f"{seconds / steps:.3f} s a step",
            flush=True,
        )

    def cache(self, recipe: Recipe, name: str, file: Path) -> None:
        """Runs and times the frozen encoder's pass over the stage's texts; the stage then finds the vectors."""
        stage = recipe.stages["bench"]
        assert isinstance(stage, Contrast)
        store = EncoderStore(recipe, self.folder, self.ranks)
        texts = read_table([file], stage.data, recipe.seed, self.folder / "cached", self.ranks).documents
        spec, tokenizer = store.spec(name), store.open(name, trained=False).tokenizer
        tokens = int(TokenTable.build(texts, spec, tokenizer, self.ranks).lengths.sum())
        began = time.monotonic()
        read_once(name, texts, store, self.folder / "cached", stage.tokens, stage.precision)
        seconds = time.monotonic() - began
        cost = cost_of(recipe, name)
        share = 100 * 2 * (cost.body if cost else 0) * tokens / seconds / 1e12 / self.ceiling
        print(
            f"caching pass: {len(texts) / seconds:,.1f} texts/s, {share:.0f} % of the ceiling, with tokenising",
            flush=True,
        )

    def recipe(self, encoders: dict[str, dict[str, object]], **stage: object) -> Recipe:
        common = {"kind": "contrast", "steps": self.sizes.steps, "lr": 1e-4, "checkpoint_every": 10**6}
        common["precision"] = self.sizes.precision
        named = {"about": "bench", "space": "bench", "dim": self.sizes.dim}
        return Recipe.model_validate({**named, "encoders": encoders, "stages": {"bench": common | stage}})


def stage_one(bench: Bench) -> None:
    file = bench.rows("texts", bench.sizes.texts // 2)
    query = {"start": str(bench.weights("gte-multilingual-base")), "pooling": "cls", "max_length": 512}
    document = {"start": str(bench.weights("qwen3-4b")), "pooling": "eos", "max_length": 512}
    document["dtype"] = bench.sizes.precision
    recipe = bench.recipe(
        {"query": query, "document": document},
        query="query",
        document="document",
        train=["query"],
        data={"files": [str(file)], "view": "texts"},
        batch=bench.sizes.align_batch,
        tokens=131072,
        loss={"mse": 1.0},
    )
    bench.cache(recipe, "document", file)
    bench.run("stage-1", recipe, file)
    print(f"stage-1: the paper has {PAPER_PAIRS_PER_SECOND} pairs/s on each GPU, both encoders together")


def lora(bench: Bench) -> None:
    sizes = bench.sizes
    file = bench.rows("long", 2 * sizes.lora_batch, tokens=sizes.lora_tokens)
    document = {"start": str(bench.weights("qwen3-4b")), "pooling": "eos", "max_length": sizes.lora_tokens}
    adapted = {"lora": {"rank": 32, "alpha": 64}, "dtype": sizes.precision, "checkpointing": True}
    recipe = bench.recipe(
        {"document": document | adapted},
        query="document",
        train=["document"],
        data={"files": [str(file)]},
        batch=sizes.lora_batch,
        steps=min(2, sizes.steps),
        tokens=32768,
    )
    bench.run("lora", recipe, file)


def peer(bench: Bench) -> None:
    sizes = bench.sizes
    file = bench.rows("pairs", sizes.peer_batch * sizes.steps)
    start = bench.weights("gte-multilingual-base")
    recipe = bench.recipe(
        {"both": {"start": str(start), "pooling": "cls", "max_length": 512}},
        query="both",
        train=["both"],
        data={"files": [str(file)]},
        batch=sizes.peer_batch,
        tokens=sizes.peer_batch * 512,
        loss={"temperature": 0.05},
    )
    bench.run("ours", recipe, file)
    sentence_transformers(bench, start, file)


def sentence_transformers(bench: Bench, start: Path, file: Path) -> None:
    """Runs the same training by sentence-transformers' trainer, with its own tokenizer calls and batches."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import PreTrainedTokenizerFast, TrainerCallback

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(start / "tokenizer.json"), **special)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(start)
    body = Transformer(str(start), max_seq_length=512, model_kwargs={"dtype": torch.float32})
    pooling = Pooling(body.get_embedding_dimension(), pooling_mode="cls")
    model = SentenceTransformer(modules=[body, pooling], device=str(bench.ranks.device))
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *given: object, **named: object) -> None:
            if bench.ranks.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic())

    pairs = list(read_all([file]))
    columns = {"anchor": [p.query for p in pairs], "positive": [p.positives[0] for p in pairs]}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(bench.folder / "peer"),
        per_device_train_batch_size=bench.sizes.peer_batch,
        max_steps=bench.sizes.steps,
        learning_rate=1e-4,
        bf16=bench.ranks.device.type == "cuda",
        use_cpu=bench.ranks.device.type == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10**6,
    )
    if bench.ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = MultipleNegativesRankingLoss(model, scale=20.0)
    SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_dict(columns), loss=loss, callbacks=[Clock()]
    ).train()
    seconds = (times[-1] - times[0]) / (len(times) - 1)
    memory = torch.cuda.max_memory_allocated() / 2**30 if bench.ranks.device.type == "cuda" else 0.0
    print(
        f"sentence-transformers: {bench.sizes.peer_batch / seconds:,.1f} pairs/s, peak {memory:.1f} GiB, "
        f"{seconds:.3f} s a step",
        flush=True,
    )


def _lengths(corpus: Path) -> np.ndarray:
    """Characters of the corpus's texts; a Chinese character is about a token."""
    return np.array([len(json.loads(line.text)["text"]) for line in read_lines(corpus)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lengths", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="care-bench-train-") as folder:
        bench = Bench(Path(folder), TINY if options.tiny else FULL, tiny=options.tiny, lengths=options.lengths)
        for part in options.parts:
            {"stage-1": stage_one, "lora": lora, "peer": peer}[part](bench)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measures how fast an LLM encodes documents on a GPU; parts may run in separate calls that share one result file.

  python -m models.bench.encode --corpus corpus.jsonl.gz --tokenizer FOLDER --real FOLDER --output var/encode
  python -m models.bench.encode --tiny --corpus examples/corpus.jsonl --tokenizer FOLDER --output var/encode

Parts (--only): ceiling, the GPU's rate at large square products; 4b and 8b, models of these shapes and random weights:
each attention, then the best at length, and with them products, the rates of a layer's products; peer,
sentence-transformers in turn with ours; fp8, in turn with bf16, and its cosines on the real weights of --real; profile,
the kernels of one batch. Shares of the ceiling count operations on real tokens only. With --tiny every step runs on a
CPU in seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from models.bench.measure import Corpus, Peer, Plan, at_length, best_way, encoder_of, fp8_cosines, one_batch, try_ways
from models.bench.shapes import SHAPES, TINY, Shape, ceiling, load_texts, products, seconds, tokenizer_of

JSON_FILE, TABLE_FILE = "encode.json", "encode.md"
PARTS = ("ceiling", "products", *SHAPES, "peer", "fp8", "profile")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with texts, .gz too")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder whose tokenizer counts the tokens")
    parser.add_argument("--real", type=Path, help="transformers folder of real weights, for the cosines of fp8")
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures; those there are kept")
    parser.add_argument("--only", default="ceiling,products,4b,8b,peer,fp8", help="parts, by commas (%(default)s)")
    parser.add_argument("--documents", type=int, default=4096, help="documents of a run at length (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=32_768, help="tokens of a batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is measured (%(default)s)")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    only = options.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    Bench(options, only).run()
    return 0


class Bench:
    """The parts that were asked for, each written down as soon as it is done."""

    def __init__(self, options: argparse.Namespace, only: list[str]) -> None:
        tiny = options.tiny
        self.device = torch.device("cpu" if tiny else "cuda")
        dtype = torch.float32 if tiny else torch.bfloat16
        budget, documents = (512, 96) if tiny else (options.token_budget, options.documents)
        self.plan = Plan(self.device, dtype, budget, options.rounds, compiled=not tiny)
        self.corpus = Corpus(load_texts(options.corpus, documents), tokenizer_of(options.tokenizer))
        self.shapes = TINY if tiny else SHAPES
        self.given, self.only = options, only
        path = options.output / JSON_FILE
        self.results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def run(self) -> None:
        lengths = self.corpus.lengths()
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.processor()
        self._keep("machine", {"card": card, "torch": torch.__version__, "documents": len(lengths),
                               "tokens a document": round(sum(lengths) / len(lengths), 1)})  # fmt: skip
        if "ceiling" in self.only:
            sizes = (128, 256) if self.given.tiny else (8192, 16384)
            self._keep("ceiling", ceiling(self.device, self.plan.dtype, sizes))
        if "ceiling" not in self.results:
            raise SystemExit("the ceiling is not known yet: run --only ceiling first, with the same --output")
        if "fp8" in self.only and self.given.real:
            attention = "varlen" if self.device.type == "cuda" else "padded"
            self._keep("quality", fp8_cosines(self.given.real, self.corpus, self.plan, attention))
        for name in SHAPES:
            if name in self.only:
                self._shape(name, self.shapes[name])

    def _shape(self, name: str, shape: Shape) -> None:
        torch._dynamo.reset()  # what was compiled for another width would make this one's dynamic
        limit = self.results["ceiling"]["bf16_best"]
        if "products" in self.only:
            found = products(shape, self.device, self.plan.dtype, self.plan.budget)
            self._keep("products", self.results.get("products", {}) | {shape.name: found})
        model = shape.build(self.device, self.plan.dtype)
        tried = try_ways(shape, model, self.corpus, self.plan, limit)
        self._keep("trials", self.results.get("trials", {}) | {shape.name: tried})
        way = best_way(tried)
        encoders = {"bf16": encoder_of(shape, model, self.corpus, self.plan, way)}
        if "profile" in self.only:
            self._profile(name, encoders["bf16"])
        if "fp8" in self.only:
            encoders["fp8"] = encoder_of(shape, model, self.corpus, self.plan, way, fp8=True)
            if "profile" in self.only:
                self._profile(f"{name}-fp8", encoders["fp8"])
        peer = self._peer(model) if "peer" in self.only else None
        figures = at_length(shape, encoders, self.corpus, self.plan, limit, peer)
        before = self.results.get("length", {})
        self._keep("length", before | {shape.name: _joined(before.get(shape.name), figures | {"way": way})})
        del model, encoders, peer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _peer(self, model: PreTrainedModel) -> Peer | None:
        """Opens sentence-transformers at its fastest; prints the error and returns None if it does not run here."""
        try:
            peer = Peer(model, self.corpus.tokenizer_json)
            some = self.corpus.texts[: len(self.corpus.texts) // 4]
            peer.choose(some, lambda work: seconds(work, self.device))
            return peer
        except Exception:
            traceback.print_exc()
            return None

    def _profile(self, name: str, encoder: Any) -> None:  # noqa: ANN401 - its forward is its own affair
        batch, _ = one_batch(self.corpus, self.plan)
        encoder._forward(batch)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            encoder._forward(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        order = "cuda_time_total" if self.device.type == "cuda" else "cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)
        (self.given.output / f"profile-{name}.txt").write_text(table, encoding="utf-8")
        print(table, flush=True)

    def _keep(self, part: str, figures: dict[str, Any]) -> None:
        print(f"{part} done", flush=True)
        self.results[part] = figures
        folder, text = self.given.output, json.dumps(self.results, indent=2, ensure_ascii=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_FILE).write_text(f"{text}\n", encoding="utf-8")
        (folder / TABLE_FILE).write_text("\n".join(tables(self.results)) + "\n", encoding="utf-8")


def _joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Keeps earlier runs that were not measured again."""
    return now | {"runs": (before or {}).get("runs", {}) | now["runs"]}


def tables(results: dict[str, Any]) -> Iterator[str]:
    machine = results.get("machine", {})
    yield ", ".join(f"{name} {value}" for name, value in machine.items())
    if "ceiling" in results:
        best = results["ceiling"]
        yield f"\nCeiling: bf16 {best['bf16_best']:.0f} TFLOP/s, fp8 by rows {best['fp8_best']:.0f} TFLOP/s."
    for name, part in results.get("trials", {}).items():
        yield from _trials(name, part)
    for name, part in results.get("products", {}).items():
        yield f"\n{name}, a layer's products, TFLOP/s"
        for matrix, rates in part.items():
            yield f"- {matrix}: " + ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
    for name, part in results.get("length", {}).items():
        yield from _length(name, part)
    if "quality" in results:
        yield from _quality(results["quality"])


def _trials(name: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"\n{name}, one batch of {part['tokens']} tokens, {part['documents']} documents"
    yield "\n| attention | TFLOP/s | of the ceiling | least cosine to padded |\n|---|---|---|---|"
    for way, one in part["ways"].items():
        if "error" in one:
            yield f"| {way} | failed | | |"
        else:
            yield f"| {way} | {one['tflops']:.1f} | {one['share']:.1%} | {one['cosine']:.5f} |"


def _length(name: str, part: dict[str, Any]) -> Iterator[str]:
    hours = f"; the paper's hours a million, on an A100: {part['paper_hours']}" if part["paper_hours"] else ""
    yield f"\n{name}, {part['documents']} documents, {part['tokens']} tokens{hours}"
    yield "\n| run | docs/s (least … most) | TFLOP/s | of the ceiling | hours a million | speed | cosine least / mean |"
    yield "|---|---|---|---|---|---|---|"
    for run, one in part["runs"].items():
        rate = f"{one['docs_per_second']:.1f} ({one['least']:.1f} … {one['most']:.1f})"
        cosine = f"{one['cosine_least']:.4f} / {one['cosine_mean']:.4f}"
        figures = f"{one['tflops']:.1f} | {one['share']:.1%} | {one['hours_per_million']:.2f} | {one['speed']:.2f}"
        yield f"| {run} | {rate} | {figures} | {cosine} |"


def _quality(part: dict[str, Any]) -> Iterator[str]:
    yield f"\nfp8 on the weights of {part['folder']}, {part['texts']} texts"
    yield "\n| | least | worst text | first percentile | below 0.99 | mean |\n|---|---|---|---|---|---|"
    for name, one in part["cosines"].items():
        worst = one["worst"].replace("|", " ").replace("\n", " ")
        yield f"| {name} | {one['least']:.5f} | {worst} | {one['p1']:.5f} | {one['below']:.2%} | {one['mean']:.5f} |"


if __name__ == "__main__":
    sys.exit(main())

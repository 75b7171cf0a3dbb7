"""The figures as JSON, which later runs add to, and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JSON_FILE = "encode.json"
TABLE_FILE = "encode.md"


def read(folder: Path) -> dict[str, Any]:
    path = folder / JSON_FILE
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def write(folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_FILE).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / TABLE_FILE).write_text("\n".join(tables(results)) + "\n", encoding="utf-8")


def tables(results: dict[str, Any]) -> Iterator[str]:
    machine = results.get("machine", {})
    yield ", ".join(f"{name} {value}" for name, value in machine.items())
    if "ceiling" in results:
        best = results["ceiling"]
        yield f"\nCeiling: bf16 {best['bf16_best']:.0f} TFLOP/s, fp8 by rows {best['fp8_best']:.0f} TFLOP/s."
    for key in ("trials", "products"):
        for name, part in results.get(key, {}).items():
            yield from _trials(name, part) if key == "trials" else _products(name, part)
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


def _products(name: str, part: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"\n{name}, a layer's products, TFLOP/s"
    for matrix, rates in part.items():
        yield f"- {matrix}: " + ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())


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

"""Helpers for curation tests: an encoder with known angles, and a step run over rows in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from models.curation.frame import Files, Step, run_step
from models.curation.vectors import STORED, TextEncoder, Vectors
from models.encoder.spec import Side


@dataclass(frozen=True)
class CircleEncoder(TextEncoder):
    """Puts texts on a circle, at the angle of their first character, or at 1 if it has none."""

    place: str = "circle"
    angles: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def opened(self) -> Any:  # type: ignore[override] # noqa: ANN401
        return SimpleNamespace(spec=SimpleNamespace(dim=2), name="circle", fingerprint="circle")

    def read(self, texts: Sequence[str], side: Side) -> Vectors:
        angles = np.array([self.angles.get(text[:1], 1.0) for text in texts])
        vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return vectors.astype(STORED).astype(np.float32)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_out(folder: Path) -> list[dict[str, Any]]:
    """Reads the output without the field of the steps."""
    made = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name != "curated"} for row in made]


def run_in(folder: Path, step: Step, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    run_step(step, Files([write_lines(folder / "rows.jsonl", rows)], folder / "out.jsonl"))
    return read_out(folder)


def report_in(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "out.jsonl.report.json").read_text(encoding="utf-8"))
    return report

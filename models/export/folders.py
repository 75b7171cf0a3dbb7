"""Looks at the source and the target of an export, before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from models.encoder.spec import RERANKER_FILE, SPEC_FILE
from models.errors import ExportError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
GRAPHS = ("model.onnx", "onnx/model.onnx")


def check_source(folder: Path) -> None:
    if not folder.is_dir():
        raise ExportError(f"{folder} is not a folder")
    if not (has_weights(folder) or graphs(folder)):
        raise ExportError(f"{folder} has neither weights (model.safetensors) nor a backbone graph (model.onnx)")


def check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise ExportError(f"{target} is the source itself: give another target")
    if target.exists() and not (target.is_dir() and (_is_described(target) or not any(target.iterdir()))):
        raise ExportError(f"{target} is there and is not an encoder folder: give another target")
    if has_weights(target):
        raise ExportError(f"{target} holds a trained encoder, which an export would replace: give another target")


def _is_described(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SPEC_FILE, RERANKER_FILE))


def has_weights(folder: Path) -> bool:
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def graphs(folder: Path) -> list[Path]:
    """Returns the graphs of a backbone that an exporter of others wrote."""
    return [folder / name for name in GRAPHS if (folder / name).is_file()]

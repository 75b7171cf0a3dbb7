from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from models.export.parity import CHECK_TEXTS
from models.training.recipe import Recipe
from tests.support.toy_training import plain, toy_rows, write_rows, write_start


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Uses one thread: toy tensors are too small to share, and waiting threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws no picture, which takes as long as a toy run; test_run.py draws one."""
    if "picture" not in request.keywords:
        monkeypatch.setattr("models.training.run.draw_curves", lambda folder: None)


@pytest.fixture
def few_check_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares only a few texts at export; tests/integration/test_export_pipeline.py compares all."""
    for module in ("parity", "pipeline"):
        monkeypatch.setattr(f"models.export.{module}.CHECK_TEXTS", CHECK_TEXTS[:8])


@pytest.fixture
def toy_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Makes a recipe of a pair, bert and qwen3, with one contrast stage; arguments replace keys of the stage."""

    def make(seed: int = 0, extra: dict[str, object] | None = None, **stage: object) -> Recipe:
        for name, architecture, layers in (("query", "bert", 1), ("document", "qwen3", 2)):
            if not (tmp_path / name).is_dir():
                write_start(tmp_path / name, architecture, layers=layers)
        rows = [*plain(toy_rows("a"))[:6], *plain(toy_rows("b"))[6:]]
        data = {"files": [str(write_rows(tmp_path / "rows.jsonl", rows))], "negatives": 1}
        settings = {
            "kind": "contrast",
            "query": "query",
            "train": ["query"],
            "data": data,
            "batch": 4,
            "steps": 6,
            "lr": 1e-3,
            "tokens": 150,
            "checkpoint_every": 2,
        }
        pooling = {"query": "cls", "document": "eos"}
        encoders = {
            name: {"start": str(tmp_path / name), "pooling": pooled, "max_length": 40}
            for name, pooled in pooling.items()
        }
        whole = {"about": "toy", "space": "toy", "dim": 32, "seed": seed, "encoders": encoders}
        return Recipe.model_validate(whole | {"stages": {"tune": settings | stage}} | (extra or {}))

    return make

"""Small evaluation sets, and an encoder with known vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import EncoderSpec, Pooling, Side
from models.evaluation.encoders import OpenEncoder
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet, Task, plain_task

VECTORS = {"猫": (1.0, 0.0), "狗": (0.0, 1.0), "小猫": (0.8, 0.6), "小狗": (0.6, 0.8)}

PETS = RetrievalSet(
    "pets", ["d1", "d2"], ["猫", "狗"], ["q1", "q2"], ["小猫", "小狗"], {"q1": {"d1": 1}, "q2": {"d1": 1}}
)
LISTS = RerankSet("lists", ["小猫", "小狗"], [[("狗", 2), ("猫", 0)], [("狗", 2), ("猫", 1)]], relevant=2)
PAIRS = PairSet("pairs", [("猫", "猫"), ("猫", "小猫"), ("猫", "小狗")], [1.0, 0.8, 0.6])

RETRIEVAL = plain_task("zoo", PETS, Kind.RETRIEVAL)
RERANK = plain_task("zoo", LISTS, Kind.RERANK)
STS = plain_task("zoo", PAIRS, Kind.STS)
TASKS: tuple[Task, ...] = (RETRIEVAL, RERANK, STS)


def a_spec(space: str = "zoo", dim: int = 2, query_instruction: str = "") -> EncoderSpec:
    return EncoderSpec(
        architecture="none",
        sides=tuple(Side),
        pooling=Pooling.CLS,
        native_dim=dim,
        dim=dim,
        max_length=16,
        space=space,
        query_instruction=query_instruction,
    )


class TableEncoder:
    """Returns the known vectors of known texts, with or without an instruction, and records the texts."""

    def __init__(self, name: str = "table", spec: EncoderSpec | None = None) -> None:
        self.name, self.spec = name, spec or a_spec()
        self.asked: list[str] = []

    def opened(self) -> OpenEncoder:
        return OpenEncoder(self.name, self.spec, f"fingerprint of {self.name}", 7, self._encode)

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.asked.extend(texts)
        return np.array([VECTORS[text.rpartition(":")[2].strip()] for text in texts], dtype=np.float32)


def write_set(folder: Path) -> Path:
    """Writes a retrieval set of two documents and one query."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "corpus.jsonl", [{"_id": "d1", "title": "题", "text": "文"}, {"_id": "d2", "text": "另一"}])
    write_lines(folder / "queries.jsonl", [{"_id": "q1", "text": "问"}])
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\n", encoding="utf-8")
    return folder


def write_lines(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path

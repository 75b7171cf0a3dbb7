"""Evaluation sets on disk: retrieval in BEIR's shape, reranking lists, sentence pairs.

A defect of the data is named with file and line. Knows nothing of encoders or metrics.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from models.errors import BadData

class Kind(StrEnum):
    """What a set asks of a system."""

    RETRIEVAL = "retrieval"
    LINKING = "linking"
    RERANK = "rerank"
    STS = "sts"


Qrels = dict[str, dict[str, int]]
"""Grades of relevance by query id and document id."""


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, the corpus they are asked of, and which documents answer them."""

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: Qrels


@dataclass(frozen=True)
class RerankSet:
    """Lists of candidates with a grade each."""

    name: str
    queries: list[str]
    candidates: list[list[tuple[str, int]]]


@dataclass(frozen=True)
class PairSet:
    """Sentence pairs with the similarity that people gave them."""

    name: str
    pairs: list[tuple[str, str]]
    scores: list[float]


def load_retrieval(folder: Path) -> RetrievalSet:
    """A folder with queries.jsonl, qrels.tsv and corpus.jsonl(.gz), which may stand in the folder above."""
    ids, documents = _corpus(_find_corpus(folder))
    queries = {row["_id"]: row["text"] for row, _ in _rows(folder / "queries.jsonl", ("_id", "text"))}
    qrels = _qrels(folder / "qrels.tsv", set(ids), set(queries))
    for query in queries:
        if query not in qrels:
            raise BadData(f"{folder / 'qrels.tsv'}: query {query!r} of queries.jsonl has no judgement")
    return RetrievalSet(folder.name, ids, documents, list(queries), list(queries.values()), qrels)


def find_sets(root: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Retrieval folders, reranking files and pair files below a folder; folders named train are left out."""
    retrieval = sorted(path.parent for path in root.rglob("qrels.tsv") if "train" not in path.parts)
    rerank = sorted(root.rglob("rerank/*.jsonl"))
    pairs = sorted(root.rglob("sts/*.jsonl"))
    if not retrieval and not rerank and not pairs:
        raise BadData(f"{root}: no evaluation set (a folder with qrels.tsv, rerank/*.jsonl or sts/*.jsonl)")
    return retrieval, rerank, pairs


def load_rerank(path: Path) -> RerankSet:
    """Lines {query, candidates: [{text, grade}]}."""
    rows = [row for row, _ in _rows(path, ("query", "candidates"))]
    lists = [[(c["text"], int(c["grade"])) for c in row["candidates"]] for row in rows]
    return RerankSet(path.stem, [row["query"] for row in rows], lists)


def load_pairs(path: Path) -> PairSet:
    """Lines {a, b, score}."""
    rows = [row for row, _ in _rows(path, ("a", "b", "score"))]
    return PairSet(path.stem, [(row["a"], row["b"]) for row in rows], [float(row["score"]) for row in rows])


def _find_corpus(folder: Path) -> Path:
    for place in (folder, folder.parent):
        for name in ("corpus.jsonl", "corpus.jsonl.gz"):
            if (place / name).is_file():
                return place / name
    raise BadData(f"{folder}: no corpus.jsonl or corpus.jsonl.gz, neither here nor in the folder above")


@lru_cache(maxsize=1)
def _corpus(path: Path) -> tuple[list[str], list[str]]:
    """Ids and texts; kept, because sets that share a corpus are read one after the other."""
    rows = [row for row, _ in _rows(path, ("_id", "text"))]
    if not rows:
        raise BadData(f"{path}: the corpus is empty")
    texts = [f"{row['title']}\n{row['text']}" if row.get("title") else row["text"] for row in rows]
    return [row["_id"] for row in rows], texts


def _rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], int]]:
    if not path.is_file():
        raise BadData(f"{path}: no such file")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadData(f"{path}:{number}: not JSON: {error}") from error
            missing = [field for field in fields if not isinstance(row, dict) or field not in row]
            if missing:
                raise BadData(f"{path}:{number}: lacks {', '.join(missing)}")
            yield row, number


def _qrels(path: Path, documents: set[str], queries: set[str]) -> Qrels:
    qrels: Qrels = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        raise BadData(f"{path}: no judgements")
    for number, line in enumerate(lines[1:], start=2):
        parts = line.split("\t")
        if len(parts) != 3 or not parts[2].lstrip("-").isdigit():
            raise BadData(f"{path}:{number}: not 'query-id<TAB>corpus-id<TAB>score'")
        query, document, grade = parts
        if document not in documents:
            raise BadData(f"{path}:{number}: document {document!r} is not in the corpus")
        if query not in queries:
            raise BadData(f"{path}:{number}: query {query!r} is not in queries.jsonl")
        qrels.setdefault(query, {})[document] = int(grade)
    return qrels

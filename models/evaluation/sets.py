"""Reads evaluation sets (retrieval in BEIR's format, reranking lists, sentence pairs) and defines their tasks.

A defect of the data is named with file and line.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from models.encoder.spec import Side
from models.errors import BadData
from models.rows import read_lines


class Kind(StrEnum):
    """What a set asks of a system."""

    RETRIEVAL = "retrieval"
    LINKING = "linking"
    RERANK = "rerank"
    STS = "sts"


METRICS: dict[Kind, tuple[str, ...]] = {
    Kind.RETRIEVAL: (
        *("nDCG@10", "nDCG@20", "Recall@5", "Recall@20", "Recall@100", "MRR@10"),
        *("Acc@1", "Acc@5", "Acc@10"),
    ),
    Kind.LINKING: ("MRR@5", "Recall@1", "Recall@5"),
    Kind.RERANK: ("MAP@10", "MAP", "nDCG", "MRR@10"),
    Kind.STS: ("Pearson", "Spearman"),
}
"""What is measured for each kind; the first is the figure that the papers print."""

Qrels = dict[str, dict[str, int]]
"""Grades of relevance by query id and document id; 1 and more are relevant."""


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, the corpus they are asked of, and which documents answer them. Sets of one corpus share its lists."""

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: Qrels

    def grades(self) -> list[dict[int, int]]:
        """Returns the grades of each query's judged documents, by row of the corpus."""
        rows = {document: row for row, document in enumerate(self.document_ids)}
        return [{rows[document]: grade for document, grade in self.qrels[query].items()} for query in self.query_ids]

    def answers(self) -> list[list[int]]:
        """Returns the rows of the documents that answer each query."""
        return [[row for row, grade in of_query.items() if grade > 0] for of_query in self.grades()]


@dataclass(frozen=True)
class RerankSet:
    """Lists of candidates (text, grade); from the grade `relevant` on, a candidate is relevant."""

    name: str
    queries: list[str]
    candidates: list[list[tuple[str, int]]]
    relevant: int = 1


@dataclass(frozen=True)
class PairSet:
    """Sentence pairs with the similarity that people gave them."""

    name: str
    pairs: list[tuple[str, str]]
    scores: list[float]


@dataclass(frozen=True)
class Task:
    """One set as one benchmark asks it.

    The set is a RetrievalSet for the kinds retrieval and linking, a RerankSet for rerank, a PairSet for sts. An
    instruction of None leaves the encoder its own; a text, even an empty one, replaces it. The encoder's template joins
    a query instruction with the query. `main_metric`, one of METRICS[kind], is what the benchmark prints. `hyde_prompt`
    asks a language model for a document that would answer {query}; without one, `remote` has a prompt.
    """

    benchmark: str
    data: RetrievalSet | RerankSet | PairSet
    kind: Kind
    main_metric: str
    query_instruction: str | None = None
    document_instruction: str | None = None
    hyde_prompt: str | None = None

    @property
    def name(self) -> str:
        return self.data.name

    def instruction(self, side: Side) -> str | None:
        return self.query_instruction if side is Side.QUERY else self.document_instruction

    def texts(self) -> list[tuple[Side, list[str]]]:
        """Everything that an encoder reads for this task; both sentences of a pair count as queries."""
        match self.data:
            case RetrievalSet():
                return [(Side.QUERY, self.data.queries), (Side.DOCUMENT, self.data.documents)]
            case RerankSet():
                candidates = [text for of_query in self.data.candidates for text, _ in of_query]
                return [(Side.QUERY, self.data.queries), (Side.DOCUMENT, candidates)]
            case PairSet():
                return [(Side.QUERY, [pair[place] for pair in self.data.pairs]) for place in (0, 1)]


def plain_task(benchmark: str, data: RetrievalSet | RerankSet | PairSet, kind: Kind) -> Task:
    """Returns a task by the kind's own main metric and without instructions."""
    return Task(benchmark, data, kind, METRICS[kind][0])


QUERIES, QRELS, SPLIT_QRELS = "queries.jsonl", "qrels.tsv", "qrels"
LINKING, RERANK, STS, TRAIN = "linking", "rerank", "sts", "train"
# On the usual scale 0 … 2 a candidate of grade 1 is near the query and not an answer to it.
RELEVANT_CANDIDATE = 2
_INTEGER = re.compile(r"-?\d{1,9}")

Row = dict[str, Any]


def find_tasks(root: Path) -> list[Task]:
    """Reads and checks every set below a folder, also behind links, but not in folders named train.

    A folder with queries.jsonl is a retrieval set, a linking set below a folder named linking; rerank/*.jsonl and
    sts/*.jsonl are the other kinds. The folder that holds a set names its benchmark.
    """
    if not root.is_dir():
        raise BadData(f"{root}: no such folder")
    folders = list(_folders(root))
    tasks = []
    for folder in (folder for folder in folders if (folder / QUERIES).is_file()):
        kind = Kind.LINKING if LINKING in folder.relative_to(root).parts else Kind.RETRIEVAL
        benchmark = (folder if folder == root else folder.parent).resolve().name
        tasks.append(plain_task(benchmark, load_retrieval(folder), kind))

    def files(name: str) -> list[Path]:
        named = [folder for folder in folders if name in (folder.name, folder.resolve().name)]
        return [path for folder in named for path in sorted(folder.glob("*.jsonl"))]

    tasks += [plain_task(RERANK, load_rerank(path), Kind.RERANK) for path in files(RERANK)]
    tasks += [plain_task(STS, load_pairs(path), Kind.STS) for path in files(STS)]
    if not tasks:
        raise BadData(f"{root}: no evaluation set (a folder with {QUERIES}, {RERANK}/*.jsonl or {STS}/*.jsonl)")
    return tasks


def load_retrieval(folder: Path, split: str = "test") -> RetrievalSet:
    """Loads a folder with queries.jsonl, corpus.jsonl(.gz), which may be in the folder above, and qrels.tsv.

    With BEIR's qrels/SPLIT.tsv instead, the queries that the split does not judge belong to another one.
    """
    corpus = find_corpus(folder).resolve()
    ids, documents = _read_corpus(corpus, corpus.stat().st_mtime_ns, corpus.stat().st_size)
    queries = {row["_id"]: (row["text"], number) for row, number in _unique_rows(folder / QUERIES)}
    if not queries:
        raise BadData(f"{folder / QUERIES}: there is no query")
    whole = (folder / QRELS).is_file() or not (folder / SPLIT_QRELS).is_dir()
    path = folder / QRELS if whole else folder / SPLIT_QRELS / f"{split}.tsv"
    qrels = _qrels(path, set(ids), set(queries))
    for query, (_, number) in queries.items():
        if query not in qrels and not whole:
            continue
        if not any(grade > 0 for grade in qrels.get(query, {}).values()):
            raise BadData(f"{folder / QUERIES}:{number}: query {query!r} has no relevant document in {path.name}")
    judged = {query: text for query, (text, _) in queries.items() if query in qrels}
    return RetrievalSet(folder.resolve().name, ids, documents, list(judged), list(judged.values()), qrels)


def load_rerank(path: Path) -> RerankSet:
    """Lines {query, candidates: [{text, grade}]}; relevant is grade 2, or grade 1 if no candidate has more."""
    queries, lists = [], []
    for row, number in _rows(path):
        where = f"{path}:{number}"
        queries.append(_text(row, "query", where, filled=True))
        candidates = row.get("candidates")
        if not isinstance(candidates, list) or not candidates:
            raise BadData(f"{where}: candidates is not a list of at least one")
        lists.append([_candidate(value, f"{where}: candidate {n}") for n, value in enumerate(candidates, start=1)])
    if not queries:
        raise BadData(f"{path}: there is no list")
    best = max(grade for candidates in lists for _, grade in candidates)
    if best < 1:
        raise BadData(f"{path}: no candidate has a grade above 0")
    return RerankSet(path.stem, queries, lists, min(RELEVANT_CANDIDATE, best))


def load_pairs(path: Path) -> PairSet:
    """Lines {a, b, score}."""
    pairs, scores = [], []
    for row, number in _rows(path):
        where = f"{path}:{number}"
        pairs.append((_text(row, "a", where, filled=True), _text(row, "b", where, filled=True)))
        score = row.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise BadData(f"{where}: score {score!r} is not a finite number")
        scores.append(float(score))
    if len(set(scores)) < 2:
        raise BadData(f"{path}: a correlation needs pairs of at least two different scores")
    return PairSet(path.stem, pairs, scores)


def order(text: str) -> bytes:
    """Returns a shuffle that depends on nothing but the text."""
    return blake2b(text.encode(), digest_size=8).digest()


def write_retrieval(folder: Path, documents: Sequence[str], questions: Iterable[tuple[str, set[str]]]) -> None:
    """Writes a retrieval set of different documents; a question comes with the documents that answer it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {text: f"d{row}" for row, text in enumerate(documents)}
    with (folder / "corpus.jsonl").open("wb") as corpus:
        corpus.writelines(orjson.dumps({"_id": id, "text": text}) + b"\n" for text, id in ids.items())
    with (folder / QUERIES).open("wb") as queries, (folder / QRELS).open("w", encoding="utf-8") as qrels:
        print("query-id\tcorpus-id\tscore", file=qrels)
        for row, (query, answers) in enumerate(questions):
            queries.write(orjson.dumps({"_id": f"q{row}", "text": query}) + b"\n")
            for text in sorted(answers, key=order):
                print(f"q{row}\t{ids[text]}\t1", file=qrels)


def _folders(root: Path) -> Iterator[Path]:
    """Yields the root and the folders below it, each once, however many links lead there."""
    seen: set[str] = set()
    for place, names, _ in os.walk(root, followlinks=True):
        real = os.path.realpath(place)
        # In place, as os.walk has it: what is left is what it enters.
        names[:] = [] if real in seen else sorted(name for name in names if name != TRAIN)
        if real not in seen:
            yield Path(place)
        seen.add(real)


def find_corpus(folder: Path) -> Path:
    """Returns the corpus of a set's folder, which may be in the folder above; raises BadData if there is none."""
    for place in (folder, folder.parent):
        for path in (place / "corpus.jsonl", place / "corpus.jsonl.gz"):
            if path.is_file():
                return path
    raise BadData(f"{folder}: no corpus.jsonl or corpus.jsonl.gz, neither here nor in the folder above")


@lru_cache(maxsize=1)
def _read_corpus(path: Path, mtime_ns: int, size: int) -> tuple[list[str], list[str]]:
    """Returns ids and texts; sets that share a corpus and are read one after the other share the lists."""
    ids, texts = [], []
    for row, number in _unique_rows(path, filled=False):
        title = row.get("title") or ""
        if not isinstance(title, str):
            raise BadData(f"{path}:{number}: title is not a text")
        ids.append(row["_id"])
        texts.append(f"{title}\n{row['text']}" if title else row["text"])
    if not ids:
        raise BadData(f"{path}: the corpus is empty")
    return ids, texts


def _unique_rows(path: Path, *, filled: bool = True) -> Iterator[tuple[Row, int]]:
    """Yields rows {_id, text}, each id once."""
    first: dict[str, int] = {}
    for row, number in _rows(path):
        id = _text(row, "_id", f"{path}:{number}", filled=True)
        _text(row, "text", f"{path}:{number}", filled=filled)
        if id in first:
            raise BadData(f"{path}:{number}: id {id!r} was given in line {first[id]} already")
        first[id] = number
        yield row, number


def _text(row: Row, field: str, where: str, *, filled: bool) -> str:
    if field not in row:
        raise BadData(f"{where}: lacks {field}")
    value = row[field]
    if not isinstance(value, str):
        raise BadData(f"{where}: {field} is not a text")
    if filled and not value.strip():
        raise BadData(f"{where}: {field} is empty")
    return value


def _candidate(value: object, where: str) -> tuple[str, int]:
    if not isinstance(value, dict):
        raise BadData(f"{where} is not an object {{text, grade}}")
    grade = value.get("grade")
    if isinstance(grade, bool) or not isinstance(grade, int) or abs(grade) >= 10**9:
        raise BadData(f"{where}: grade {str(grade)[:20]} is not a whole number of at most nine digits")
    return _text(value, "text", where, filled=True), grade


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    for line in read_lines(path):
        try:
            row = orjson.loads(line.text)
        except orjson.JSONDecodeError as error:
            raise BadData(f"{line.where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadData(f"{line.where}: not an object")
        yield row, line.number


def _qrels(path: Path, documents: set[str], queries: set[str]) -> Qrels:
    qrels: Qrels = {}
    for line in read_lines(path):
        where, parts = line.where, line.text.rstrip("\r\n").split("\t")
        is_grade = len(parts) == 3 and _INTEGER.fullmatch(parts[2]) is not None
        if line.number == 1:
            if is_grade:
                raise BadData(f"{where}: a judgement where the header query-id<TAB>corpus-id<TAB>score should be")
            continue
        if not is_grade:
            raise BadData(f"{where}: not 'query-id<TAB>corpus-id<TAB>score' with a whole number of at most nine digits")
        query, document, grade = parts
        if document not in documents:
            raise BadData(f"{where}: document {document!r} is not in the corpus")
        if query not in queries:
            raise BadData(f"{where}: query {query!r} is not in {QUERIES}")
        # A repeated judgement is allowed; chip-cdn has some.
        before = qrels.setdefault(query, {}).setdefault(document, int(grade))
        if before != int(grade):
            raise BadData(f"{where}: document {document!r} of query {query!r} was given grade {before} before")
    if not qrels:
        raise BadData(f"{path}: no judgements")
    return qrels

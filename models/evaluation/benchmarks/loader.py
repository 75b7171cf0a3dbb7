"""Loads the tasks of a benchmark by its name: from a folder, else through mteb or from the hub.

A set that is missing, or of another size, is reported with how to get it; a set whose files are broken is an error.
mteb and datasets are imported when a set needs them.
"""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from models.errors import CareError
from models.evaluation.benchmarks import Benchmark, SetSpec, names, read
from models.evaluation.mteb_model import import_mteb
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet, Task, load_pairs, load_rerank, load_retrieval

AnySet = RetrievalSet | RerankSet | PairSet

PROBE_SECONDS = 5
SUBSET = "default"
"""What mteb calls the only subset of a task in one language."""
RETRIEVAL_FILES = "queries.jsonl, corpus.jsonl and qrels.tsv in"
SHAPES = {
    Kind.RETRIEVAL: RETRIEVAL_FILES,
    Kind.LINKING: RETRIEVAL_FILES,
    Kind.RERANK: "lines {query, candidates: [{text, grade}]} in",
    Kind.STS: "lines {a, b, score} in",
}


class Unavailable(CareError):
    """A set that could not be loaded; the message is the reason."""


def load(name: str, data: Path | None, *, instructions: bool = False) -> tuple[list[Task], dict[str, str]]:
    """Returns the tasks that could be loaded, and for each other set one line: why it is not there and how to get it.

    Tasks carry the benchmark's instructions only if asked to: an encoder that was not trained to follow them finds less
    with them.
    """
    if data is not None and not data.is_dir():
        raise CareError(f"{data}: no such folder")
    sources = _Sources(read(name), data)
    tasks: list[Task] = []
    missing: dict[str, str] = {}
    for item in sources.benchmark.sets:
        try:
            found = sources.load(item)
        except Unavailable as error:
            missing[item.name] = str(error)
            continue
        asked = (item.query_instruction, item.document_instruction) if instructions else (None, None)
        tasks.append(Task(name, found, item.kind, item.metric, *asked, sources.benchmark.hyde_prompt(item)))
    return tasks, missing


def listing(data: Path | None) -> str:
    """Writes a table of every benchmark and its sets: kind, metric, size and source of the set; then the warnings.

    Sets in the folder are read, so that one that is broken or of another size is seen here already.
    """
    lines = ["| benchmark | set | kind | metric | queries | documents | from |", "|---|---|---|---|---:|---:|---|"]
    benchmarks = [read(name) for name in names()]
    for sources in (_Sources(benchmark, data) for benchmark in benchmarks):
        for item in sources.benchmark.sets:
            documents = f"{item.counts.documents:,}" if item.counts.documents else ""
            sizes = (f"{item.counts.queries:,}", documents)
            cells = (sources.benchmark.name, item.name, item.kind, item.metric, *sizes, sources.describe(item))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n{known.name}: {known.note}" for known in benchmarks if known.note)])


class _Sources:
    """Where the sets of one benchmark come from: a data folder, if there is one, and the libraries."""

    def __init__(self, benchmark: Benchmark, data: Path | None) -> None:
        self.benchmark = benchmark
        self._data = data
        self._hub_problem = cache(unreachable)  # asked once, and only if a set needs it

    def describe(self, item: SetSpec) -> str:
        """Returns where the set comes from, or why it does not; no library is asked."""
        place = self._find(item)
        if place is None:
            return source_of(item) or "not here: a folder must bring it"
        try:
            self.load(item)
        except CareError as error:
            return str(error)
        return str(place)

    def load(self, item: SetSpec) -> AnySet:
        """Returns the set, of the size that the benchmark says; Unavailable says why not, and how to get it."""
        place, source = self._find(item), source_of(item)
        found: AnySet
        if place is None:
            found = self._fetch(item)
        elif item.kind is Kind.STS:
            found = replace(load_pairs(place), name=item.name)
        elif item.kind is Kind.RERANK:
            found = replace(load_rerank(place), name=item.name, relevant=item.relevant)
        else:
            found = replace(load_retrieval(place, item.split), name=item.name)
        queries = len(found.pairs if isinstance(found, PairSet) else found.queries)
        difference = item.counts.differ(queries, len(found.documents) if isinstance(found, RetrievalSet) else None)
        if difference:
            instead = f"leave it out for {source}, or " if place and source else ""
            raise Unavailable(f"{place or source} is another set: it has {difference}; {instead}{self._how(item)}")
        return found

    def _fetch(self, item: SetSpec) -> AnySet:
        source = source_of(item)
        if source is None:
            raise Unavailable(self._how(item))
        problem = self._hub_problem()
        if problem:
            raise Unavailable(f"{source}: {problem}; or {self._how(item)}")
        try:
            return fetch(item)
        except CareError as error:
            raise Unavailable(f"{error}; or {self._how(item)}") from error

    def _how(self, item: SetSpec) -> str:
        """Says in one line what to put where, and where to get the data."""
        place = self._places(item, self._data or Path("DATA"))[0]
        return f"put {SHAPES[item.kind]} {place}" + (f" ({item.obtain})" if item.obtain else "")

    def _find(self, item: SetSpec) -> Path | None:
        places = self._places(item, self._data) if self._data else []
        return next((place for place in places if place.exists()), None)

    def _places(self, item: SetSpec, data: Path) -> list[Path]:
        """Returns where in the folder the set may lie, the usual place first."""
        if item.path:
            return [data / item.path]
        own = Path(item.kind, f"{item.name}.jsonl") if item.kind in (Kind.RERANK, Kind.STS) else Path(item.name)
        places = [data / own, data / self.benchmark.name / own]
        return [*places, data / item.kind / own] if item.kind is Kind.LINKING else places


def unreachable() -> str | None:
    """Says why the hub cannot be reached; None if it can, or if offline mode is on and only earlier downloads are read.

    The libraries themselves try for half a minute a file before they give up.
    """
    try:
        hub = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return "huggingface_hub is not installed; pip install mteb"
    if hub.HF_HUB_OFFLINE:
        return None
    try:
        with urllib.request.urlopen(urllib.request.Request(hub.ENDPOINT, method="HEAD"), timeout=PROBE_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"{hub.ENDPOINT} cannot be reached ({reason}); HF_HUB_OFFLINE=1 reads what was downloaded before"


def fetch(item: SetSpec) -> AnySet:
    """Loads the set by the library that its description names; raises Unavailable with the reason."""
    try:
        if not item.mteb:
            return _by_hub(item)
        task = import_mteb().get_task(item.mteb, eval_splits=[item.split])
        task.load_data()
        return from_mteb(task, item)
    except CareError:
        raise
    except Exception as error:  # the errors of mteb, datasets and the hub have no common class
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"{source_of(item)}: {type(error).__name__}: {reason}") from error


def source_of(item: SetSpec) -> str | None:
    """Returns where a library would look for the set, in words; None if only a folder can bring it."""
    if item.mteb:
        return f"mteb task {item.mteb}"
    return f"hub dataset {item.hub}" if item.hub else None


def from_mteb(task: Any, item: SetSpec) -> AnySet:  # noqa: ANN401 -- mteb need not be installed
    """Converts a loaded mteb task (AbsTaskRetrieval, which reranks too, or AbsTaskSTS) to a set of the given kind."""
    if item.kind is Kind.STS:
        first, second = task.column_names
        rows = task.dataset[item.split]
        return PairSet(item.name, list(zip(rows[first], rows[second], strict=True)), [float(s) for s in rows["score"]])
    task.convert_v1_dataset_format_to_v2(num_proc=None)
    split = task.dataset[SUBSET][item.split]
    documents = {row["id"]: document_text(row) for row in split["corpus"]}
    queries = {row["id"]: row["text"] for row in split["queries"]}
    qrels = {query: split["relevant_docs"][query] for query in queries}
    if item.kind is not Kind.RERANK:
        return _retrieval_set(item, documents, queries, qrels)
    lists = [
        [(documents[document], int(qrels[query].get(document, 0))) for document in split["top_ranked"][query]]
        for query in queries
    ]
    return RerankSet(item.name, list(queries.values()), lists, item.relevant)


def _by_hub(item: SetSpec) -> AnySet:
    """Reranking: one table of queries with their candidates (SciRepEval). Retrieval: three tables (CMIRB)."""
    try:
        load = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise Unavailable("datasets is not installed; pip install mteb") from error
    if item.kind is Kind.RERANK:
        return from_candidates(load(item.hub, item.subset, split=item.split), item)
    documents = {row["id"]: row["text"] for row in load(item.hub, "corpus", split="corpus")}
    queries = {row["id"]: row["text"] for row in load(item.hub, "queries", split="queries")}
    qrels: dict[str, dict[str, int]] = {}
    for row in load(item.hub, SUBSET, split=item.split):
        qrels.setdefault(row["q_id"], {})[row["p_id"]] = row["score"]
    return _retrieval_set(item, documents, {query: text for query, text in queries.items() if query in qrels}, qrels)


def from_candidates(rows: Any, item: SetSpec) -> RerankSet:  # noqa: ANN401 -- a datasets.Dataset
    """Converts rows {query: paper, candidates: [paper with a score]}; a paper has title and abstract."""
    queries, lists = [], []
    for row in rows:
        queries.append(document_text(row["query"], "abstract"))
        lists.append([(document_text(paper, "abstract"), int(paper["score"])) for paper in row["candidates"]])
    return RerankSet(item.name, queries, lists, item.relevant)


def document_text(row: Mapping[str, Any], field: str = "text") -> str:
    """Title and text on two lines, as sets in folders are read."""
    return "\n".join(filter(None, (row.get("title"), row.get(field))))


def _retrieval_set(
    item: SetSpec, documents: dict[str, str], queries: dict[str, str], qrels: Mapping[str, Mapping[str, int]]
) -> RetrievalSet:
    grades = {query: {document: int(grade) for document, grade in qrels[query].items()} for query in queries}
    for query, of_query in grades.items():
        for document in of_query.keys() - documents.keys():
            raise Unavailable(f"{source_of(item)}: document {document!r} of query {query!r} is not in the corpus")
    texts = list(documents.values())
    return RetrievalSet(item.name, list(documents), texts, list(queries), list(queries.values()), grades)

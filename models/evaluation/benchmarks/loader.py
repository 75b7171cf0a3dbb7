"""From a benchmark's name to the tasks of its sets: from a folder first, then from the library that has the set.

A set that is not there, or that is not the benchmark's, is named with how to get it; a set whose files are broken is
an error, because someone brought them on purpose.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from models.errors import CareError
from models.evaluation.benchmarks import libraries
from models.evaluation.benchmarks.libraries import AnySet, Unavailable
from models.evaluation.benchmarks.spec import Benchmark, SetSpec, names, read
from models.evaluation.reading import load_pairs, load_rerank, load_retrieval
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet, Task

SHAPES = {
    Kind.RETRIEVAL: "queries.jsonl, corpus.jsonl and qrels.tsv in",
    Kind.LINKING: "queries.jsonl, corpus.jsonl and qrels.tsv in",
    Kind.RERANK: "lines {query, candidates: [{text, grade}]} in",
    Kind.STS: "lines {a, b, score} in",
}


def load(name: str, data: Path | None, *, instructions: bool = False) -> tuple[list[Task], dict[str, str]]:
    """The tasks that could be loaded, and for each other set one line: why it is not there and how to get it.

    Only if `instructions` are asked for do the tasks carry the benchmark's: an encoder that was not trained to follow
    them finds less with them.
    """
    if data is not None and not data.is_dir():
        raise CareError(f"{data}: no such folder")
    shelf = _Shelf(read(name), data)
    tasks: list[Task] = []
    missing: dict[str, str] = {}
    for item in shelf.benchmark.sets:
        try:
            found = shelf.load(item)
        except Unavailable as error:
            missing[item.name] = str(error)
            continue
        asked = (item.query_instruction, item.document_instruction) if instructions else (None, None)
        tasks.append(Task(name, found, item.kind, item.metric, *asked, shelf.benchmark.hyde_prompt(item)))
    return tasks, missing


def listing(data: Path | None) -> str:
    """Every benchmark with its sets, as a table: kind, metric, size, and where the set comes from; then the warnings.

    Sets in the folder are read, so that what is broken or of another size is seen here already.
    """
    lines = ["| benchmark | set | kind | metric | queries | documents | from |", "|---|---|---|---|---:|---:|---|"]
    benchmarks = [read(name) for name in names()]
    for shelf in (_Shelf(benchmark, data) for benchmark in benchmarks):
        for item in shelf.benchmark.sets:
            documents = f"{item.counts.documents:,}" if item.counts.documents else ""
            sizes = (f"{item.counts.queries:,}", documents)
            cells = (shelf.benchmark.name, item.name, item.kind, item.metric, *sizes, shelf.whence(item))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n{known.name}: {known.note}" for known in benchmarks if known.note)])


class _Shelf:
    """Where the sets of one benchmark stand: a data folder, if there is one, and the libraries."""

    def __init__(self, benchmark: Benchmark, data: Path | None) -> None:
        self.benchmark = benchmark
        self._data = data
        self._hub_problem = cache(libraries.unreachable)  # asked once, and only if a set needs it

    def find(self, item: SetSpec) -> Path | None:
        places = self._places(item, self._data) if self._data else []
        return next((place for place in places if place.exists()), None)

    def whence(self, item: SetSpec) -> str:
        """Where the set comes from, or why it does not; no library is asked."""
        place = self.find(item)
        if place is None:
            return libraries.source_of(item) or "not here: a folder must bring it"
        try:
            self.load(item)
        except CareError as error:
            return str(error)
        return str(place)

    def load(self, item: SetSpec) -> AnySet:
        """The set, of the size that the benchmark says; Unavailable tells why not, and how to get it."""
        place = self.find(item)
        found = self._fetch(item) if place is None else _read(place, item)
        difference = item.counts.differ(*_size(found))
        if difference:
            source = libraries.source_of(item)
            instead = f"leave it out for {source}, or " if place and source else ""
            raise Unavailable(f"{place or source} is another set: it has {difference}; {instead}{self._how(item)}")
        return found

    def _fetch(self, item: SetSpec) -> AnySet:
        source = libraries.source_of(item)
        if source is None:
            raise Unavailable(self._how(item))
        problem = self._hub_problem()
        if problem:
            raise Unavailable(f"{source}: {problem}; or {self._how(item)}")
        try:
            return libraries.fetch(item)
        except CareError as error:
            raise Unavailable(f"{error}; or {self._how(item)}") from error

    def _how(self, item: SetSpec) -> str:
        """One line: what to put where, and where the data are to be had."""
        place = self._places(item, self._data or Path("DATA"))[0]
        return f"put {SHAPES[item.kind]} {place}" + (f" ({item.obtain})" if item.obtain else "")

    def _places(self, item: SetSpec, data: Path) -> list[Path]:
        """Where in the folder the set may lie, the usual place first."""
        if item.path:
            return [data / item.path]
        own = Path(item.kind, f"{item.name}.jsonl") if item.kind in (Kind.RERANK, Kind.STS) else Path(item.name)
        places = [data / own, data / self.benchmark.name / own]
        return [*places, data / item.kind / own] if item.kind is Kind.LINKING else places


def _read(place: Path, item: SetSpec) -> AnySet:
    if item.kind is Kind.STS:
        return replace(load_pairs(place), name=item.name)
    if item.kind is Kind.RERANK:
        return replace(load_rerank(place), name=item.name, relevant=item.relevant)
    return replace(load_retrieval(place, item.split), name=item.name)


def _size(data: AnySet) -> tuple[int, int | None]:
    """How many queries, and documents where the set has a corpus."""
    match data:
        case RetrievalSet():
            return len(data.queries), len(data.documents)
        case RerankSet():
            return len(data.queries), None
        case PairSet():
            return len(data.pairs), None

"""Stores pairs of training texts as memory-mapped tables that all processes share.

A process holds the row numbers of a batch and the texts that it asks for, whatever the size of the corpus. The first
rank writes the files of a stage; the others map them. Tables that are given no folder stay in memory.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from models.encoder.spec import Side
from models.errors import BadData
from models.rows import Pair
from models.training.ranks import Ranks
from models.training.texts import Coded, Column, Rows, Strings, Texts, map_file

LISTS = ("positives", "negatives", "hypothetical", "answers")
META, SCRATCH = "table.json", "texts"


class Ragged:
    """A list of rows for each row, in two flat arrays."""

    def __init__(self, starts: Rows, values: Rows) -> None:
        self.starts, self.values = starts, values

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        sizes = np.fromiter((len(rows) for rows in lists), np.int64, len(lists))
        return cls.cut(sizes, np.fromiter((row for rows in lists for row in rows), np.int64, int(sizes.sum())))

    @classmethod
    def cut(cls, sizes: Rows, values: Rows) -> Ragged:
        """Values that lie one list after the other, with the size of each list."""
        return cls(np.concatenate([[0], np.cumsum(sizes)]), values)

    def __getitem__(self, row: int) -> Rows:
        rows: Rows = self.values[self.starts[row] : self.starts[row + 1]]
        return rows

    def sizes(self, rows: Rows) -> Rows:
        sizes: Rows = self.starts[rows + 1] - self.starts[rows]
        return sizes

    def pick(self, rows: Rows, places: Rows) -> Rows:
        """One value of each of these rows, by its place in the row."""
        values: Rows = self.values[self.starts[rows] + places]
        return values

    def gather(self, rows: Rows) -> tuple[Rows, Rows]:
        """Returns the values of these rows, and for each value the position in `rows` that it belongs to."""
        sizes = self.sizes(rows)
        owners = np.repeat(np.arange(len(rows)), sizes)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return owners, self.values[self.starts[rows][owners] + within]


class _Groups:
    """Collects the name of each row."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._codes = array("q")

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, name: str) -> None:
        self._codes.append(self._names.setdefault(name, len(self._names)))

    def rows(self, chosen: Rows | None = None) -> dict[str, Rows]:
        """Returns the rows of each name; with `chosen`, positions in it. Names without rows are left out."""
        codes = np.array(self._codes, dtype=np.int64)
        codes = codes if chosen is None else codes[chosen]
        found = {name: np.flatnonzero(codes == code) for name, code in self._names.items()}
        return {name: rows for name, rows in found.items() if len(rows)}


@dataclass(frozen=True)
class PairTable:
    """All pairs as rows into two lists of texts; `sources[name]` are the pairs of one source."""

    queries: Texts
    documents: Texts
    query: Rows
    """The query row of each pair."""
    positives: Ragged
    negatives: Ragged
    hypothetical: Ragged
    """Document rows that are read together with the query."""
    answers: Ragged
    """The document rows that answer each query row, whichever pair says so, with whatever instruction."""
    sources: dict[str, Rows]
    corpus: dict[str, Rows] = field(default_factory=dict)
    """Document rows by source, of documents that were given beside the pairs."""

    def __len__(self) -> int:
        return len(self.query)

    @cached_property
    def digest(self) -> str:
        """A hash of the texts, and of which of them belong together."""
        digest = blake2b(f"{self.queries.digest} {self.documents.digest} {list(self.sources)}".encode(), digest_size=12)
        parts = (part for name in LISTS for part in (getattr(self, name).starts, getattr(self, name).values))
        for rows in (self.query, *parts, *self.sources.values()):
            digest.update(np.ascontiguousarray(rows).data)
        return digest.hexdigest()

    def check_sources(self, key: str, named: Iterable[str]) -> None:
        """Refuses a key of the recipe that names a source without rows: it would have no effect."""
        for source in named:
            if source not in self.sources:
                raise BadData(f"{key}: no row is of {source!r}; the files have {', '.join(sorted(self.sources))}")

    @classmethod
    def of_pairs(
        cls, pairs: Iterable[Pair], corpus: Iterable[tuple[str, str]] = (), folder: Path | None = None
    ) -> PairTable:
        """Reads pairs, and documents (text, source) beside them; texts go to the folder, if there is one."""
        instructions: dict[str | None, int] = {}
        codes, sizes = array("q"), array("q")
        sources, beside = _Groups(), _Groups()
        with closing(Column(folder, "queries.txt")) as asked, closing(Column(folder, "documents.txt")) as answering:
            for pair in pairs:
                codes.append(instructions.setdefault(pair.instruction, len(instructions)))
                asked.add(pair.query, codes[-1])
                sources.add(pair.source)
                for texts in (pair.positives, pair.negatives, pair.hypothetical):
                    sizes.append(len(texts))
                    for text in texts:
                        answering.add(text)
            for text, source in corpus:
                answering.add(text)
                beside.add(source)
        if not codes:
            raise BadData("the stage's files hold no training rows")
        queries, query, firsts = asked.finish()
        documents, rows, _ = answering.finish()
        counts = np.array(sizes, dtype=np.int64)
        kinds = np.repeat(np.tile(np.arange(3), len(codes)), counts)
        named, others = rows[: len(kinds)], rows[len(kinds) :]
        positives, negatives, hypothetical = (Ragged.cut(counts[k::3], named[kinds == k]) for k in range(3))
        owners, answered = positives.gather(np.arange(len(query)))
        # Rows that differ in their instruction have different queries, but the answers of one text.
        asking = queries.groups() if len(instructions) > 1 else np.arange(len(queries))
        known = np.unique(asking[query[owners]] * len(documents) + answered)
        starts = np.searchsorted(known, np.arange(len(queries) + 1) * len(documents))
        of_text = Ragged(starts, known % len(documents))
        answers = Ragged.cut(of_text.sizes(asking), of_text.gather(asking)[1])
        given = Coded(list(instructions), np.array(codes)[firsts]) if set(instructions) != {None} else None
        asks, answers_with = Texts(Side.QUERY, queries, given), Texts(Side.DOCUMENT, documents)
        found = {name: np.unique(others[own]) for name, own in beside.rows().items()}
        lists = (positives, negatives, hypothetical, answers)
        return cls(asks, answers_with, query, *lists, sources.rows(), found)

    @classmethod
    def of_texts(cls, texts: Iterable[tuple[str, str]], folder: Path | None = None) -> PairTable:
        """Makes each text a query whose document is itself; a text belongs to the source that it came from first."""
        sources = _Groups()
        with closing(Column(folder, "documents.txt")) as column:
            for text, source in texts:
                column.add(text)
                sources.add(source)
        if not len(sources):
            raise BadData("the stage's files hold no training rows")
        unique, _, firsts = column.finish()
        own, none = Ragged(np.arange(len(unique) + 1), np.arange(len(unique))), Ragged.of([[]] * len(unique))
        asked, read = Texts(Side.QUERY, unique), Texts(Side.DOCUMENT, unique)
        return cls(asked, read, own.values, own, none, none, own, sources.rows(firsts))

    def limited_to(self, pairs: Rows, *, negatives: bool = True) -> PairTable:
        """Returns the table with the texts of these pairs alone. Pairs keep their numbers; texts are renumbered."""
        lists = (self.positives, self.negatives, self.hypothetical)
        queries = np.unique(self.query[pairs])
        read = lists if negatives else (self.positives, self.hypothetical)
        documents = np.unique(np.concatenate([part.gather(pairs)[1] for part in read]))
        places, query_places = (np.full(len(texts), -1, np.int64) for texts in (self.documents, self.queries))
        places[documents], query_places[queries] = np.arange(len(documents)), np.arange(len(queries))
        owners, answers = self.answers.gather(queries)
        answers_of = Ragged.cut(np.bincount(owners, minlength=len(queries)), places[answers])
        positives, others, hypothetical = (Ragged(part.starts, places[part.values]) for part in lists)
        texts, renumbered = (self.queries.take(queries), self.documents.take(documents)), query_places[self.query]
        return PairTable(*texts, renumbered, positives, others, hypothetical, answers_of, self.sources, self.corpus)

    def save(self, folder: Path) -> None:
        """Writes the rows beside the texts, which lie in the folder already."""
        meta: dict[str, Any] = {"sources": list(self.sources), "corpus": list(self.corpus)}
        arrays = {"query": self.query}
        for side in (self.queries, self.documents):
            texts, given = side.texts, side.instructions
            assert isinstance(texts, Strings)
            meta[side.side] = texts.file
            arrays |= {f"{side.side}-starts": texts.starts, f"{side.side}-sizes": texts.sizes}
            if isinstance(given, Coded):
                meta["instructions"], arrays["instructions"] = given.values, given.codes
        for name in LISTS:
            part = getattr(self, name)
            arrays |= {f"{name}-starts": part.starts, f"{name}-values": part.values}
        for kind, groups in (("source", self.sources), ("corpus", self.corpus)):
            arrays |= {f"{kind}-{place}": rows for place, rows in enumerate(groups.values())}
        for name, rows in arrays.items():
            np.save(folder / f"{name}.npy", rows)
        (folder / META).write_text(json.dumps(meta), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PairTable:
        """Maps what `save` wrote."""
        meta = json.loads((folder / META).read_text(encoding="utf-8"))

        def read(name: str) -> Rows:
            rows: Rows = np.load(folder / f"{name}.npy", mmap_mode="r")
            return rows

        given = Coded(meta["instructions"], read("instructions")) if "instructions" in meta else None
        queries, documents = (
            Strings(meta[s], map_file(folder / meta[s], np.uint8), read(f"{s}-starts"), read(f"{s}-sizes"))
            for s in ("query", "document")
        )
        lists: dict[str, Any] = {name: Ragged(read(f"{name}-starts"), read(f"{name}-values")) for name in LISTS}
        sources, corpus = (
            {name: read(f"{kind}-{place}") for place, name in enumerate(meta[names])}
            for kind, names in (("source", "sources"), ("corpus", "corpus"))
        )
        texts = Texts(Side.QUERY, queries, given), Texts(Side.DOCUMENT, documents)
        return cls(*texts, query=read("query"), **lists, sources=sources, corpus=corpus)


def shared(folder: Path, ranks: Ranks, build: Callable[[], PairTable]) -> PairTable:
    """Returns a table that the first rank builds in the folder, and that all ranks map."""
    if ranks.is_first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        build().save(folder)
    ranks.wait()
    return PairTable.load(folder)

"""Stores training texts and pairs as memory-mapped tables that all processes share.

A process holds the row numbers of a batch and the texts that it asks for, whatever the size of the corpus. The first
rank writes the files of a stage; the others map them. Tables that are given no folder stay in memory.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import EncoderSpec, Side
from models.errors import BadData
from models.rows import Pair
from models.training.ranks import Ranks

Rows = NDArray[np.int64]
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


class Strings(Sequence[str]):
    """Texts by row, decoded from one buffer when they are asked for."""

    def __init__(self, file: str, buffer: NDArray[np.uint8], starts: Rows, sizes: Rows) -> None:
        self.file, self.buffer, self.starts, self.sizes = file, buffer, starts, sizes
        self._bytes = buffer.data

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return list(self.take(row))
        return self._text(int(self.starts[row]), int(self.sizes[row]))

    def __iter__(self) -> Iterator[str]:
        # Several times as fast as asking for one after the other: there may be millions.
        return map(self._text, self.starts.tolist(), self.sizes.tolist())

    def _text(self, start: int, size: int) -> str:
        return str(self._bytes[start : start + size], "utf-8", "surrogatepass")

    def groups(self) -> Rows:
        """Returns a number for each text, the same for equal texts."""
        keys = b"".join(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in self)
        groups: Rows = np.unique(np.frombuffer(keys, np.uint64), return_inverse=True)[1]
        return groups

    def take(self, rows: Rows | slice) -> Strings:
        return Strings(self.file, self.buffer, self.starts[rows], self.sizes[rows])


class _Column:
    """Collects texts; equal texts become one row, and rows are numbered by their first occurrence."""

    def __init__(self, folder: Path | None, file: str) -> None:
        self._path, self.file = folder / file if folder else None, file
        self._buffer: BinaryIO = self._path.open("wb") if self._path else BytesIO()
        self._sizes, self._digests = array("q"), bytearray()

    def add(self, text: str, kind: int = 0) -> None:
        """Adds one occurrence; texts of different kinds are never equal."""
        raw = text.encode("utf-8", "surrogatepass")
        self._buffer.write(raw)
        self._sizes.append(len(raw))
        self._digests += blake2b(raw, digest_size=16, salt=kind.to_bytes(8, "little")).digest()

    def finish(self) -> tuple[Strings, Rows, Rows]:
        """Returns the texts, the row of each occurrence, and the first occurrence of each row."""
        sizes = np.array(self._sizes, dtype=np.int64)
        keys = np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the first of equal keys is the first occurrence
        new = np.ones(len(order), dtype=bool)
        new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        firsts = np.sort(order[new])
        rows = np.empty(len(order), dtype=np.int64)
        rows[order] = np.searchsorted(firsts, order[new])[np.cumsum(new) - 1]
        starts = (np.cumsum(sizes) - sizes)[firsts]
        in_memory = self._buffer.getvalue() if isinstance(self._buffer, BytesIO) else b""
        buffer = map_file(self._path, np.uint8) if self._path else np.frombuffer(in_memory, np.uint8)
        return Strings(self.file, buffer, starts, sizes[firsts]), rows, firsts

    def close(self) -> None:
        if self._path:
            self._buffer.close()


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


class _Coded(Sequence[str | None]):
    """A few different values, by a code for each row."""

    def __init__(self, values: list[str | None], codes: Rows) -> None:
        self.values, self.codes = values, codes

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, row: int) -> str | None: ...
    @overload
    def __getitem__(self, row: slice) -> list[str | None]: ...
    def __getitem__(self, row: int | slice) -> str | list[str | None] | None:
        if isinstance(row, slice):
            return [self.values[code] for code in self.codes[row].tolist()]
        return self.values[int(self.codes[row])]


@dataclass(frozen=True)
class Texts:
    """Texts of one side, each once; `instructions` may replace the encoder's own instruction for queries."""

    side: Side
    texts: Sequence[str]
    instructions: Sequence[str | None] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """A hash of each text with its instruction; once, for there may be millions."""
        found, given = bytearray(), repeat(None, len(self)) if self.instructions is None else self.instructions
        for instruction, text in zip(given, self.texts, strict=True):
            parts = [part.encode("utf-8", "surrogatepass") for part in (instruction or "", text)]
            # The length keeps two pairs apart that join to the same bytes; no instruction is not an empty one.
            before = b"%d %d " % (instruction is None, len(parts[0]))
            found += blake2b(before + parts[0] + parts[1], digest_size=8).digest()
        return np.frombuffer(bytes(found), np.uint64)

    @cached_property
    def digest(self) -> str:
        """A hash of all texts and instructions in their order."""
        return blake2b(self.keys.tobytes(), digest_size=12).hexdigest()

    def as_read_by(self, spec: EncoderSpec | None, rows: slice) -> Sequence[str]:
        """Returns the texts with their instructions; a reranker has no encoder spec and reads them unchanged."""
        texts = self.texts[rows]
        if spec is None:
            return texts
        own = spec.instruction(self.side)
        if self.instructions is None:
            return [own + text for text in texts]
        given = zip(self.instructions[rows], texts, strict=True)
        return [(own if instruction is None else spec.prompt(instruction)) + text for instruction, text in given]

    def take(self, rows: Rows) -> Texts:
        given: Sequence[str | None] | None = self.instructions
        if given is not None:
            given = (
                _Coded(given.values, given.codes[rows]) if isinstance(given, _Coded) else [given[row] for row in rows]
            )
        texts = self.texts.take(rows) if isinstance(self.texts, Strings) else [self.texts[row] for row in rows]
        return Texts(self.side, texts, given)


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
        with closing(_Column(folder, "queries.txt")) as asked, closing(_Column(folder, "documents.txt")) as answering:
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
        given = _Coded(list(instructions), np.array(codes)[firsts]) if set(instructions) != {None} else None
        asks, answers_with = Texts(Side.QUERY, queries, given), Texts(Side.DOCUMENT, documents)
        found = {name: np.unique(others[own]) for name, own in beside.rows().items()}
        lists = (positives, negatives, hypothetical, answers)
        return cls(asks, answers_with, query, *lists, sources.rows(), found)

    @classmethod
    def of_texts(cls, texts: Iterable[tuple[str, str]], folder: Path | None = None) -> PairTable:
        """Makes each text a query whose document is itself; a text belongs to the source that it came from first."""
        sources = _Groups()
        with closing(_Column(folder, "documents.txt")) as column:
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
            if isinstance(given, _Coded):
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

        given = _Coded(meta["instructions"], read("instructions")) if "instructions" in meta else None
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


def map_file(path: Path, dtype: Any) -> NDArray[Any]:  # noqa: ANN401 - numpy's own
    """Returns a file as an array; an empty one cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

"""Holds texts as a memory-mapped column that all processes share, and says how an encoder reads them.

Columns that are given no folder stay in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import EncoderSpec, Side

Rows = NDArray[np.int64]


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


class Column:
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


class Coded(Sequence[str | None]):
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
            given = Coded(given.values, given.codes[rows]) if isinstance(given, Coded) else [given[row] for row in rows]
        texts = self.texts.take(rows) if isinstance(self.texts, Strings) else [self.texts[row] for row in rows]
        return Texts(self.side, texts, given)


def map_file(path: Path, dtype: Any) -> NDArray[Any]:  # noqa: ANN401 - numpy's own
    """Returns a file as an array; an empty one cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

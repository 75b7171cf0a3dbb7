"""Writes arrays and byte strings to disk in a stream, memory-maps them for reading, and hashes them in parts.

Files are little-endian and never unpickled. Nothing is written through a map: on a full disk a map kills the process
with a signal, a write raises an error.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import DTypeLike, NDArray

from indexer.errors import BadSnapshot, TooLarge

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]
Rows = NDArray[np.int64]

WRITE_BUFFER_BYTES = 1 << 20
ROWS_OF_A_PART = 1 << 17
SCANNED_AT_ONCE = 1 << 20


def load_array(path: Path, dtype: str, shape: tuple[int | None, ...]) -> Array:
    """Maps a .npy file for reading; raises BadSnapshot unless it has this type and shape (None: any length)."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadSnapshot(f"{path} is not a readable array ({error}); build the snapshot again") from error
    fits = len(mapped.shape) == len(shape) and all(
        expected in (None, actual) for expected, actual in zip(shape, mapped.shape, strict=True)
    )
    if mapped.dtype != np.dtype(dtype) or not fits:
        expected = f"{dtype} {tuple('any' if length is None else length for length in shape)}"
        raise BadSnapshot(f"{path} holds {mapped.dtype.str} {mapped.shape}, expected {expected}; build it again")
    plain: Array = mapped.view(np.ndarray)  # slicing the memmap subclass is several times slower
    return plain


class ArrayWriter(AbstractContextManager["ArrayWriter"]):
    """Appends rows to a .npy file whose length is known at the end; a `with` closes the file if a build fails."""

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        """`dtype` names its byte order."""
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._row_bytes = self._dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        self._file = path.open("wb", buffering=WRITE_BUFFER_BYTES)
        self._write_header(0)
        self._data_start = self._file.tell()
        self._bytes = 0

    def __exit__(self, *error: object) -> None:
        self._file.close()  # without completing it, unless close() did

    def __len__(self) -> int:
        return self._bytes // self._row_bytes

    def append(self, rows: Any) -> None:  # noqa: ANN401 - whatever numpy makes an array of
        """Writes `rows` (any number, *row_shape); raises TooLarge for integers that numpy would wrap."""
        given = np.asarray(rows)
        if self._dtype.kind in "iu" and given.dtype.kind in "iu" and given.dtype.itemsize > self._dtype.itemsize:
            most = np.iinfo(self._dtype).max
            if given.size and int(given.max()) > most:
                raise TooLarge(
                    f"{self._file.name} holds numbers up to {most}, not {int(given.max())}: "
                    "divide the corpus into several collections"
                )
        self._bytes += self._file.write(given.astype(self._dtype, copy=False).tobytes())

    def close(self) -> int:
        """Completes the file; returns the number of rows."""
        rows = len(self)
        self._file.seek(0)
        # numpy pads a header for any length of the first axis, so the final one has the size of the first.
        self._write_header(rows)
        if self._file.tell() != self._data_start:
            raise AssertionError("numpy wrote a header of another size")
        self._file.close()
        return rows

    def _write_header(self, rows: int) -> None:
        header = {"descr": dtype_to_descr(self._dtype), "fortran_order": False, "shape": (rows, *self._row_shape)}
        write_array_header_1_0(self._file, header)


class BlobWriter:
    """Appends byte strings to `<name>.bin`, and the offset of each to `<name>.offsets.npy`."""

    def __init__(self, folder: Path, name: str, files: ExitStack) -> None:
        """`files` closes the files of a failed build."""
        self._file = files.enter_context((folder / f"{name}.bin").open("wb", buffering=WRITE_BUFFER_BYTES))
        self._offsets = files.enter_context(ArrayWriter(folder / f"{name}.offsets.npy", "<i8"))
        self._offsets.append([0])
        self._end = 0

    def append(self, *runs: bytes) -> None:
        ends = []
        for run in runs:
            self._end += self._file.write(run)
            ends.append(self._end)
        self._offsets.append(ends)

    def close(self) -> None:
        self._file.close()
        self._offsets.close()


class Blob:
    """The byte strings of a BlobWriter by position; each is copied out of the map when asked for."""

    def __init__(self, data: mmap.mmap | bytes, offsets: Array) -> None:
        self.data = data
        self.offsets = offsets.data  # its items are plain integers: slicing by numpy's takes twice as long

    @classmethod
    def open(cls, folder: Path, name: str, length: int | None = None) -> Blob:
        offsets = load_array(folder / f"{name}.offsets.npy", "<i8", (None if length is None else length + 1,))
        path = folder / f"{name}.bin"
        size = path.stat().st_size if path.is_file() else -1
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != size:
            raise BadSnapshot(f"{path} does not have the length that its offsets say; build the snapshot again")
        if size == 0:  # an empty file cannot be mapped
            return cls(b"", offsets)
        with path.open("rb") as file:
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), offsets)

    @classmethod
    def of(cls, runs: Sequence[bytes]) -> Blob:
        """Holds byte strings in memory."""
        return cls(b"".join(runs), np.cumsum([0, *map(len, runs)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> bytes:
        if position < 0:
            raise IndexError(position)
        return self.data[self.offsets[position] : self.offsets[position + 1]]


def part_bits(rows: int) -> int:
    """Returns how many leading bits of a hash name its part: sorting and joining takes the memory of one part."""
    return (rows // ROWS_OF_A_PART).bit_length()


def rows_of_part(hashes: Array, bits: int, part: int) -> Rows:
    """Returns the rows, ascending, of the `hashes` (rows,) uint64 whose first `bits` bits are `part`."""
    shift = np.uint64(64 - bits)  # numpy shifts a number by all its 64 bits to 0, the only part there is
    starts = range(0, len(hashes), SCANNED_AT_ONCE)
    found = [np.flatnonzero(hashes[start : start + SCANNED_AT_ONCE] >> shift == part) + start for start in starts]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

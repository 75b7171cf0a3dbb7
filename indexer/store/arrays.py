"""Arrays and runs of bytes on disk, memory-mapped. Knows nothing of what they mean.

Everything is little-endian whatever machine writes it, and nothing is ever unpickled.
"""

from __future__ import annotations

import mmap
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexer.store.errors import BadSnapshot

Array = NDArray[Any]


def save_array(path: Path, values: Any, dtype: str) -> None:  # noqa: ANN401 - whatever numpy makes an array of
    """Writes one .npy file; `dtype` names its byte order."""
    np.save(path, np.asarray(values, dtype=dtype), allow_pickle=False)


def load_array(path: Path, dtype: str, shape: tuple[int | None, ...]) -> Array:
    """A read-only map of one .npy file, refused unless it has this type and shape (None: any length)."""
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
    # The memmap subclass makes every slice several times dearer; the view keeps the map alive all the same.
    plain: Array = mapped.view(np.ndarray)
    return plain


class BlobWriter:
    """Appends runs of bytes to `<name>.bin`; close() writes where each begins to `<name>.offsets.npy`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}.bin").open("wb")
        self._offsets_path = folder / f"{name}.offsets.npy"
        self._offsets = array("q", [0])

    def append(self, run: bytes) -> None:
        self._file.write(run)
        self._offsets.append(self._offsets[-1] + len(run))

    def release(self) -> None:
        """Closes the file without completing it; after close() it does nothing."""
        self._file.close()

    def close(self) -> None:
        self._file.close()
        save_array(self._offsets_path, self._offsets, "<i8")


class Blob:
    """The runs of bytes that a BlobWriter wrote, by position; a run is copied out of the map when asked for."""

    def __init__(self, data: mmap.mmap | bytes, offsets: Array) -> None:
        self._data = data
        self._offsets = offsets

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

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, position: int) -> bytes:
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self._data[self._offsets[position] : self._offsets[position + 1]]

"""The nearest layer: values in this process's memory, the least recently used going first. Knows nothing of Redis."""

from __future__ import annotations

from collections import OrderedDict

# What an entry takes beside its value: its key, two objects' heads and its place in the table.
ENTRY_BYTES = 250


class ProcessCache:
    """Holds values up to a number of bytes; only the event loop's thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, key: bytes) -> bytes | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        if len(value) + ENTRY_BYTES > self._max_bytes:
            return
        if (known := self._values.pop(key, None)) is not None:
            self._bytes -= len(known) + ENTRY_BYTES
        self._values[key] = value
        self._bytes += len(value) + ENTRY_BYTES
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._values.popitem(last=False)[1]) + ENTRY_BYTES

"""The threads of one batch: parts that do not depend on each other are done side by side. Knows nothing of queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Part = TypeVar("Part")
Done = TypeVar("Done")


class Team:
    """The thread that calls and its helpers, `size` in all; a helper exists once it was needed."""

    def __init__(self, size: int = 1) -> None:
        self._size = size
        self._helpers = ThreadPoolExecutor(size - 1, "care-helper") if size > 1 else None

    def each(self, work: Callable[[Part], Done], parts: Sequence[Part]) -> list[Done]:
        """What the work makes of each part, in order. Raises only after every thread has ended its share."""
        if self._helpers is None or len(parts) < 2:
            return _do(work, parts)
        shares = [parts[first :: self._size] for first in range(min(self._size, len(parts)))]
        helped = [self._helpers.submit(_do, work, share) for share in shares[1:]]
        try:
            own = _do(work, shares[0])
        finally:
            wait(helped)
        done = [own, *(future.result() for future in helped)]
        return [done[number % self._size][number // self._size] for number in range(len(parts))]


def _do(work: Callable[[Part], Done], share: Sequence[Part]) -> list[Done]:
    return [work(part) for part in share]

"""Texts to batches of tokens while the device works: tokenised ahead in a thread, filled up to a token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from models.packed.layout import SHORT_TOKENS
from models.tokenizer import Tokenizer, Tokens

# One call of the tokenizer, which spreads it over the cores and holds no lock meanwhile; two calls ahead keep a device
# busy that needs longer for their tokens than they take.
CHUNK_TEXTS = 512
AHEAD = 2


@dataclass(frozen=True, slots=True)
class Item:
    """A text's tokens, and where its vector belongs."""

    row: int
    tokens: Tokens


def tokenised(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[Item]:
    """Every text, longest first (by characters), while later ones are being tokenised."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
    chunks = [order[start : start + CHUNK_TEXTS] for start in range(0, len(order), CHUNK_TEXTS)]
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        ahead: deque[tuple[list[int], Future[list[Tokens]]]] = deque()
        for rows in chunks:
            ahead.append((rows, pool.submit(tokenizer.batch, [texts[row] for row in rows])))
            if len(ahead) > AHEAD:
                yield from _items(*ahead.popleft())
        while ahead:
            yield from _items(*ahead.popleft())


def _items(rows: list[int], future: Future[list[Tokens]]) -> Iterator[Item]:
    for row, tokens in zip(rows, future.result(), strict=True):
        yield Item(row, tokens)


def batches(items: Iterable[Item], budget: Callable[[], int]) -> Iterator[list[Item]]:
    """Items in their order, in lists of at most so many tokens; one that is longer comes alone.

    Short texts are read apart, so that it does not depend on a text's company how fp8 reads it (`Packed.short`). The
    budget is asked for anew each time: it may have shrunk.
    """
    waiting: dict[bool, list[Item]] = {False: [], True: []}
    sizes = {False: 0, True: 0}
    for item in items:
        short = len(item.tokens) <= SHORT_TOKENS
        if waiting[short] and sizes[short] + len(item.tokens) > budget():
            yield waiting[short]
            waiting[short], sizes[short] = [], 0
        waiting[short].append(item)
        sizes[short] += len(item.tokens)
    yield from filter(None, waiting.values())

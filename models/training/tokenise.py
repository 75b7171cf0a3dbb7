"""Many texts to token ids, on all cores. Knows nothing of torch, so that its processes start at once.

The tokenizer itself uses every core; what Python makes of its answers does not. So millions of texts are cut up by
processes, which send flat arrays back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context

from models.tokenizer import FlatIds, Tokenizer, flatten

AT_ONCE = 4096
# Fewer are done before a process has begun.
MANY = 200_000

Flat = tuple[FlatIds, FlatIds]
"""The ids of some texts in one run, and the length of each."""

_own: list[Tokenizer] = []
"""A process's tokenizer, once it has one."""


def tokenise(chunks: Iterable[Sequence[str]], texts: int, tokenizer: Tokenizer, processes: int = 0) -> Iterator[Flat]:
    """Each chunk's tokens, in order. `texts` is how many there are in all; 0 processes: as many as there are cores."""
    processes = processes or (len(os.sched_getaffinity(0)) if texts >= MANY else 1)
    if processes < 3:
        return (flatten(tokenizer.batch(chunk)) for chunk in chunks)
    return _by_processes(iter(chunks), tokenizer, processes)


def _by_processes(chunks: Iterator[Sequence[str]], tokenizer: Tokenizer, processes: int) -> Iterator[Flat]:
    with _single_threaded(), ProcessPoolExecutor(processes, get_context("spawn"), _begin, (tokenizer,)) as pool:
        ahead = [pool.submit(_flat, chunk) for chunk in islice(chunks, 2 * processes)]
        while ahead:
            yield ahead.pop(0).result()
            ahead.extend(pool.submit(_flat, chunk) for chunk in islice(chunks, 1))


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Processes begun in here leave the cores to each other."""
    name = "RAYON_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _begin(tokenizer: Tokenizer) -> None:
    _own.append(tokenizer)


def _flat(chunk: Sequence[str]) -> Flat:
    return flatten(_own[0].batch(chunk))

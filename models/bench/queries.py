"""Measures queries per second of encoders, BM25 and hybrids: one query at a time, all systems in turn.

  python -m models.bench.queries DATA/cmirb DATA/chip-cdn --encoder bge-small-zh-v1.5,pooling=cls \\
    --hybrid models/pretrained/care-pair-zh --encoder my-document-encoder,precision=fp32

Timed is the query's side of a search: an encoder makes the vector, BM25 finds the documents of the set, a hybrid does
both and fuses two rankings. The search for vectors is left out: it is the same for all encoders of one dimension. An
encoder is a folder as `care eval` takes it. Prints the rows of a table: the median of the rounds, least and most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

from models.encoder.spec import Side
from models.errors import BadData, CareError
from models.evaluation.encoders import open_encoder
from models.evaluation.readers import EncoderReader
from models.evaluation.sets import RetrievalSet, Task, find_tasks
from models.fusion import CANDIDATES, Fusion, fuse
from models.lexical import LexicalIndex
from models.package import positive

WARM_UP_SECONDS = 0.3
"""Before each turn: after torch, the next encoder is slower by a tenth for some queries."""

Question = tuple[str, Task, LexicalIndex]
Answer = Callable[[Question], object]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path, nargs="+", help="folders with retrieval sets")
    parser.add_argument("--encoder", action="append", default=[], metavar="FOLDER", help="repeatable")
    parser.add_argument("--hybrid", action="append", default=[], metavar="FOLDER",
                        help="an encoder alone and with BM25, repeatable")  # fmt: skip
    parser.add_argument("--queries", type=positive, default=6, metavar="N", help="of each set (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="turns of each system (%(default)s)")
    options = parser.parse_args(arguments)
    questions = list(_questions([task for folder in options.sets for task in find_tasks(folder)], options.queries))
    if not questions:
        raise BadData(f"{', '.join(map(str, options.sets))}: no retrieval set")
    systems: dict[str, Answer] = {"BM25": _words}
    for text in (*options.encoder, *options.hybrid):
        encoder = open_encoder(text)
        if encoder.name in systems:
            raise BadData(f"two systems are called {encoder.name!r}; give each once, and folders different names")
        reader = EncoderReader(encoder, None)
        systems[encoder.name] = partial(_vector, reader)
        if text in options.hybrid:
            systems[f"hybrid {encoder.name}"] = partial(_both, reader)
    for name, rates in measure(systems, questions, options.rounds).items():
        middle, least, most = (f"{rate:,.{2 if rate < 10 else 0}f}" for rate in (median(rates), min(rates), max(rates)))
        print(f"| {name} | {middle} ({least}–{most}) |")
    characters = sum(len(query) for query, _, _ in questions) / len(questions)
    print(f"\n{len(questions)} queries of {characters:.0f} characters on average, {options.rounds} rounds")
    return 0


def measure(systems: Mapping[str, Answer], questions: Sequence[Question], rounds: int) -> dict[str, list[float]]:
    """Returns the queries per second of each system in each round, by the wall clock."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, answer in systems.items():
            warm = time.perf_counter() + WARM_UP_SECONDS
            for question in cycle(questions):
                answer(question)
                if time.perf_counter() > warm:
                    break
            began = time.perf_counter()
            for question in questions:
                answer(question)
            rates[name].append(len(questions) / (time.perf_counter() - began))
    return rates


def _questions(tasks: Sequence[Task], count: int) -> Iterator[Question]:
    """Yields some queries of each retrieval set, spread through it, with BM25's index of the set's corpus."""
    indexes: dict[int, LexicalIndex] = {}
    for task in tasks:
        if isinstance(task.data, RetrievalSet):
            documents, queries = task.data.documents, task.data.queries
            if id(documents) not in indexes:  # sets share a corpus
                indexes[id(documents)] = LexicalIndex.build(documents)
            for query in queries[:: max(1, len(queries) // count)][:count]:
                yield query, task, indexes[id(documents)]


def _words(question: Question) -> object:
    query, _, index = question
    return index.search(query, CANDIDATES)


def _vector(reader: EncoderReader, question: Question) -> object:
    query, task, _ = question
    return reader.read([query], Side.QUERY, task)


def _both(reader: EncoderReader, question: Question) -> object:
    """Fuses BM25's ranking with itself: what fusing costs does not depend on whose ranking it is."""
    query, task, index = question
    reader.read([query], Side.QUERY, task)
    found = index.search(query, CANDIDATES)
    return fuse(found, found, Fusion.SCORES, None, reader.trust)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CareError as error:
        sys.exit(f"queries: {error}")

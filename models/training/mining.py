"""Mines hard negatives with the encoders of a run: takes rows, returns rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from models.encoder.packed.kernels import send
from models.errors import BadData
from models.negatives import draw_negatives
from models.progress import Progress
from models.rows import Pair, read_all, write_lines
from models.training.encoders import EncoderStore
from models.training.kept import Kept
from models.training.passes import take
from models.training.ranks import Ranks
from models.training.rows import as_pairs, sampled
from models.training.stages import Mine
from models.training.tables import SCRATCH, PairTable, shared
from models.training.texts import Rows, Texts
from models.training.vectors import read_once

QUERIES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Found:
    """Search result of one pair: its documents by rank, their scores, and the best positive's score."""

    pair: int
    rows: Rows
    scores: NDArray[np.float32]
    positive: float


class Searcher:
    """Searches documents for rows with a pair of encoders, exactly, on the training device."""

    def __init__(
        self, store: EncoderStore, stage: Mine, files: list[Path], scratch: Path, corpus: Sequence[Path] = ()
    ) -> None:
        self._store, self._stage, self._files, self._scratch, self._ranks = store, stage, files, scratch, store.ranks
        self.table = shared(
            scratch, self._ranks, lambda: PairTable.of_pairs(self.rows(), documents_of(corpus), scratch)
        )
        if corpus and not self.table.corpus:
            raise BadData("corpus: the files hold no documents; name others, or leave it out to search the rows' own")

    def rows(self) -> Iterator[Pair]:
        """Reads the rows of the files in order, without those outside the sample; reads again at each call."""
        seed = self._store.recipe.seed
        return as_pairs(sampled(read_all(self._files), self._stage.sample, self._stage.halves, seed), {}, seed)

    @cached_property
    def _queries(self) -> Kept:
        return self._read(self._stage.query, self.table.queries)

    @cached_property
    def _documents(self) -> Kept:
        return self._read(self._stage.document or self._stage.query, self.table.documents)

    @cached_property
    def _imagined(self) -> Kept | None:
        """The documents as the query encoder reads them, if some of them were imagined for queries."""
        there = len(self.table.hypothetical.values) > 0
        return self._read(self._stage.query, self.table.documents) if there else None

    def _read(self, name: str, texts: Texts) -> Kept:
        return read_once(name, texts, self._store, self._scratch)

    def search(self) -> Iterator[Found]:
        """Yields the pairs of the stage's sources, each with the best of the documents that it may find.

        As many as leave `ranks[1]` when a query's answers and a pair's negatives are left out.
        """
        table, stage = self.table, self._stage
        table.check_sources("sources", stage.sources)
        for source in stage.sources or sorted(table.sources):
            pairs, corpus = table.sources[source], self._candidates(source)
            known = table.answers.sizes(table.query[pairs]) + table.negatives.sizes(pairs)
            yield from self._search(source, pairs, corpus, min(stage.ranks[1] + int(known.max()), len(corpus)))

    def _search(self, source: str, pairs: Rows, corpus: Rows, depth: int) -> Iterator[Found]:
        device, positives = self._ranks.device, self.table.positives
        known = take(self._documents, corpus, device)
        blocks = [pairs[first : first + QUERIES_AT_ONCE] for first in range(0, len(pairs), QUERIES_AT_ONCE)]
        progress = Progress(f"search {source}", "blocks", len(blocks), quiet=not self._ranks.is_first)
        for block in progress.over(blocks):
            asked = self._asked(block)
            best, places = (part.cpu().numpy() for part in torch.topk(asked @ known.T, depth))
            owners, answers = positives.gather(block)
            own = asked[send(owners, device)] * take(self._documents, answers, device)
            firsts = np.cumsum(positives.sizes(block)) - positives.sizes(block)
            top = np.maximum.reduceat(own.sum(1).cpu().numpy(), firsts)
            for at, pair in enumerate(block):
                yield Found(int(pair), corpus[places[at]], best[at], float(top[at]))

    def _candidates(self, source: str) -> Rows:
        """Returns the document rows that a row of this source may find."""
        table = self.table
        names = [source] if self._stage.within == "source" else sorted({*table.sources, *table.corpus})
        if table.corpus:
            parts = [table.corpus[name] for name in names if name in table.corpus]
        else:
            parts = [part.gather(table.sources[n])[1] for n in names for part in (table.positives, table.negatives)]
        if not parts:
            there = ", ".join(sorted(table.corpus))
            raise BadData(f"within: the corpus has no document of {source!r}, only of {there}; set within to all")
        return np.unique(np.concatenate(parts))

    def _asked(self, pairs: Rows) -> torch.Tensor:
        """Query vectors; with imagined documents, the sum with theirs, which ranks as their mean does."""
        asked = take(self._queries, self.table.query[pairs], self._ranks.device)
        if self._imagined is None:
            return asked
        owners, rows = self.table.hypothetical.gather(pairs)
        imagined = take(self._imagined, rows, self._ranks.device)
        total = asked.index_add(0, send(owners, asked.device), imagined)
        return torch.nn.functional.normalize(total, dim=-1)


def documents_of(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Returns every document of the files with its source. Documents may come twice."""
    return ((text, row.source) for row in read_all(files) for text in (*row.positives, *row.negatives))


def mine(store: EncoderStore, stage: Mine, files: list[Path], out: Path, corpus: Sequence[Path] = ()) -> dict[str, int]:
    """Writes the pairs with mined negatives after those that they have."""
    searcher = Searcher(store, stage, files, out.parent / SCRATCH, corpus)
    table = searcher.table
    mined: dict[int, Rows] = {}
    for found in searcher.search():
        # Some of what is found may be answers of this query, by any pair, or negatives that the pair has.
        known = np.concatenate([table.answers[int(table.query[found.pair])], table.negatives[found.pair]])
        mined[found.pair] = draw_negatives(
            found.rows, known, found.scores, ranks=stage.ranks, count=stage.count,
            below=None if stage.margin is None else found.positive - stage.margin,
            chance=np.random.default_rng([store.recipe.seed, found.pair]),
        )  # fmt: skip
    texts, nothing = table.documents.texts, np.empty(0, np.int64)
    rows = enumerate(searcher.rows())
    write_pairs(out, store.ranks, ((r, [*r.negatives, *(texts[d] for d in mined.get(n, nothing))]) for n, r in rows))
    counts = [len(drawn) for drawn in mined.values()]
    return {"pairs": len(table), "mined": sum(count > 0 for count in counts), "negatives": sum(counts)}


def write_pairs(path: Path, ranks: Ranks, rows: Iterator[tuple[Pair, list[str]]]) -> None:
    """Writes pairs, each with these negatives; every rank has the same rows, and the first writes them."""
    values = (
        {"query": pair.query, "pos": pair.positives, "neg": negatives, "source": pair.source}
        | ({} if pair.instruction is None else {"instruction": pair.instruction})
        | ({"hypothetical": pair.hypothetical} if pair.hypothetical else {})
        for pair, negatives in rows
    )
    if ranks.is_first:
        write_lines(path, values)

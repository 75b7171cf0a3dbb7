"""Row stages: mine hard negatives, filter pairs by consistency, drop near-duplicates. Rows in, rows out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from models.encoder.spec import Side
from models.errors import BadData
from models.progress import Progress
from models.training.encoders import Shelf
from models.training.passes import Kept, Reader, TokenTable, file_of, kept_in, take
from models.training.ranks import Ranks
from models.training.recipe import Diversify, Filter, Mine, Recipe
from models.training.rows import Pair, as_pairs, read_all
from models.training.tables import SCRATCH, PairTable, Rows, Texts, shared

QUERIES_AT_ONCE = 1024
READ_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Found:
    """What the search of one pair saw: its documents by rank, their scores, and the best positive's score."""

    pair: int
    rows: Rows
    scores: NDArray[np.float32]
    positive: float


class Searcher:
    """Reads rows and searches documents for them with a pair of encoders, exactly, on the training device."""

    def __init__(
        self,
        recipe: Recipe,
        stage: Mine | Filter,
        files: list[Path],
        shelf: Shelf,
        vectors: Path,
        ranks: Ranks,
        scratch: Path,
        corpus: Sequence[Path] = (),
    ) -> None:
        self._files, self._seed = files, recipe.seed
        self._ranks, self._stage, self._scratch = ranks, stage, scratch
        self._shelf, self._vectors = shelf, vectors
        self.table = shared(scratch, ranks, lambda: PairTable.of_pairs(self.rows(), documents_of(corpus), scratch))

    def rows(self) -> Iterator[Pair]:
        """The rows of the files in their order, read again at each call."""
        return as_pairs(read_all(self._files), {}, self._seed)

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

    def sources(self, named: list[str]) -> list[str]:
        """The sources that a stage names, or all."""
        self.table.check_sources("sources", named)
        return named or sorted(self.table.sources)

    def search(self, source: str, depth: int) -> Iterator[Found]:
        """The pairs of a source, each with the `depth` best of the documents that it may find."""
        pairs, corpus = self.table.sources[source], self._candidates(source)
        known = take(self._documents, corpus, self._ranks.device)
        depth = min(depth, len(corpus))
        blocks = [pairs[first : first + QUERIES_AT_ONCE] for first in range(0, len(pairs), QUERIES_AT_ONCE)]
        progress = Progress(f"search {source}", "blocks", len(blocks), quiet=not self._ranks.is_first)
        for block in progress.over(blocks):
            asked = self._asked(block)
            best, places = (part.cpu().numpy() for part in torch.topk(asked @ known.T, depth))
            owners, answers = self.table.positives.gather(block)
            positive = take(self._documents, answers, self._ranks.device)
            own = (asked[torch.from_numpy(owners).to(asked.device)] * positive).sum(1).cpu().numpy()
            firsts = np.cumsum(self.table.positives.sizes(block)) - self.table.positives.sizes(block)
            positives = np.maximum.reduceat(own, firsts)
            for at, pair in enumerate(block):
                yield Found(int(pair), corpus[places[at]], best[at], float(positives[at]))

    def _candidates(self, source: str) -> Rows:
        """The document rows that a row of this source may find."""
        names = [source] if self._stage.within == "source" else sorted({*self.table.sources, *self.table.corpus})
        if self.table.corpus:
            parts = [self.table.corpus[name] for name in names if name in self.table.corpus]
        else:
            lists = (self.table.positives, self.table.negatives)
            parts = [part.gather(self.table.sources[name])[1] for name in names for part in lists]
        if not parts:
            there = ", ".join(sorted(self.table.corpus))
            raise BadData(f"within: the corpus has no document of {source!r}, only of {there}; set within to all")
        return np.unique(np.concatenate(parts))

    def _asked(self, pairs: Rows) -> torch.Tensor:
        """Query vectors; with imagined documents, the sum with theirs, which ranks as their mean does."""
        asked = take(self._queries, self.table.query[pairs], self._ranks.device)
        if self._imagined is None:
            return asked
        owners, rows = self.table.hypothetical.gather(pairs)
        imagined = take(self._imagined, rows, self._ranks.device)
        total = asked.index_add(0, torch.from_numpy(owners).to(asked.device), imagined)
        return torch.nn.functional.normalize(total, dim=-1)

    def _read(self, name: str, texts: Texts) -> Kept:
        return read_once(name, texts, self._shelf, self._vectors, self._ranks, self._scratch)


def read_once(name: str, texts: Texts, shelf: Shelf, vectors: Path, ranks: Ranks, scratch: Path) -> Kept:
    """The vectors of texts by an encoder as it is now, from disk if it has read them before."""
    path = file_of(vectors, shelf.fingerprint(name), texts)
    if path.is_file():
        return kept_in(path, len(texts), shelf.spec(name).dim)
    encoder = shelf.open(name, trained=False)
    place = scratch / path.stem
    tokens = TokenTable.build(texts, encoder.spec, encoder.tokenizer, ranks.device, place, ranks)
    return Reader(encoder, ranks, tokens=READ_TOKENS, precision="bf16").keep(tokens, path)


def documents_of(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Every document of the files with its source. Documents may come twice."""
    return ((text, row.source) for row in read_all(files) for text in (*row.positives, *row.negatives))


def mine(
    recipe: Recipe,
    stage: Mine,
    files: list[Path],
    shelf: Shelf,
    vectors: Path,
    ranks: Ranks,
    out: Path,
    corpus: Sequence[Path] = (),
) -> dict[str, int]:
    """Writes the pairs with mined negatives after those that they have."""
    searcher = Searcher(recipe, stage, files, shelf, vectors, ranks, out.parent / SCRATCH, corpus)
    table = searcher.table
    first, last = stage.ranks
    mined: dict[int, Rows] = {}
    for source in searcher.sources(stage.sources):
        pairs = table.sources[source]
        # Some of what is found may be answers of this query, by whatever pair, or negatives that the pair has.
        most = int((table.answers.sizes(table.query[pairs]) + table.negatives.sizes(pairs)).max())
        for found in searcher.search(source, last + most):
            own = (table.answers[int(table.query[found.pair])], table.negatives[found.pair])
            new = ~np.isin(found.rows, np.concatenate(own))
            kept, scores = found.rows[new][first:last], found.scores[new][first:last]
            if stage.margin is not None:
                kept = kept[scores <= found.positive - stage.margin]
            chance = np.random.default_rng([recipe.seed, found.pair])
            drawn = np.sort(chance.choice(len(kept), size=min(stage.count, len(kept)), replace=False))
            mined[found.pair] = kept[drawn]
    texts = table.documents.texts
    rows = enumerate(searcher.rows())
    nothing = np.empty(0, np.int64)
    write_pairs(out, ranks, ((r, [*r.negatives, *(texts[d] for d in mined.get(n, nothing))]) for n, r in rows))
    counts = [len(drawn) for drawn in mined.values()]
    return {"pairs": len(table), "mined": sum(count > 0 for count in counts), "negatives": sum(counts)}


def filter_pairs(
    recipe: Recipe, stage: Filter, files: list[Path], shelf: Shelf, vectors: Path, ranks: Ranks, out: Path
) -> dict[str, int]:
    """Writes the pairs of which a positive is among the first `top` found; other sources pass as they are."""
    searcher = Searcher(recipe, stage, files, shelf, vectors, ranks, out.parent / SCRATCH)
    table = searcher.table
    dropped: set[int] = set()
    for source in searcher.sources(stage.sources):
        for found in searcher.search(source, stage.top):
            if not np.isin(table.positives[found.pair], found.rows).any():
                dropped.add(found.pair)
    rows = enumerate(searcher.rows())
    write_pairs(out, ranks, ((row, row.negatives) for number, row in rows if number not in dropped))
    return {"pairs": len(table), "kept": len(table) - len(dropped)}


def diversify(
    recipe: Recipe, stage: Diversify, files: list[Path], shelf: Shelf, vectors: Path, ranks: Ranks, out: Path
) -> dict[str, int]:
    """Writes the rows whose query, or the documents that, are not like too many that were kept before."""
    asked, scratch = stage.side is Side.QUERY, out.parent / SCRATCH

    def build() -> PairTable:
        if asked:
            return PairTable.of_pairs(as_pairs(read_all(files), {}, recipe.seed), folder=scratch)
        return PairTable.of_texts(documents_of(files), scratch)

    table = shared(scratch, ranks, build)
    texts = table.queries if asked else table.documents
    every = take(read_once(stage.query, texts, shelf, vectors, ranks, scratch), np.arange(len(texts)), ranks.device)
    kept = spread(every, stage.neighbours, stage.threshold, stage.most, stage.seeds)
    if asked:
        rows = enumerate(as_pairs(read_all(files), {}, recipe.seed))
        write_pairs(out, ranks, ((row, row.negatives) for number, row in rows if kept[table.query[number]]))
        return {"pairs": len(table), "kept": int(kept[table.query].sum())}
    source_of = {int(row): name for name, rows in table.sources.items() for row in rows}
    left = np.flatnonzero(kept).tolist()
    write_rows(out, ranks, ({"text": texts.texts[row], "source": source_of[row]} for row in left))
    return {"documents": len(texts), "kept": int(kept.sum())}


def spread(vectors: torch.Tensor, neighbours: int, threshold: float, most: int, seeds: int) -> NDArray[np.bool_]:
    """Which vectors (texts, dim) stay, taken in their order: all seeds, then those of which at most `most` of the
    nearest `neighbours` that stay score above the threshold."""
    kept = torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    kept[:seeds] = True
    for first in range(seeds, len(vectors), QUERIES_AT_ONCE):
        block = vectors[first : first + QUERIES_AT_ONCE]
        before = (block @ vectors[:first][kept[:first]].T > threshold).sum(1).cpu().numpy()
        within = (block @ block.T > threshold).cpu().numpy()
        stays = np.zeros(len(block), dtype=bool)
        for at in range(len(block)):
            near = before[at] + within[at, :at][stays[:at]].sum()
            stays[at] = min(near, neighbours) <= most
        kept[first : first + len(block)] = torch.from_numpy(stays).to(kept.device)
    return kept.cpu().numpy()


def write_pairs(path: Path, ranks: Ranks, rows: Iterator[tuple[Pair, list[str]]]) -> None:
    """Writes pairs, each with these negatives."""

    def values() -> Iterator[dict[str, object]]:
        for pair, negatives in rows:
            row: dict[str, object] = {"query": pair.query, "pos": pair.positives, "neg": negatives}
            row["source"] = pair.source
            if pair.instruction is not None:
                row["instruction"] = pair.instruction
            if pair.hypothetical:
                row["hypothetical"] = pair.hypothetical
            yield row

    write_rows(path, ranks, values())


def write_rows(path: Path, ranks: Ranks, rows: Iterator[dict[str, object]]) -> None:
    """Writes a JSON-lines file, whole or not at all; every rank has the same rows, and the first writes them."""
    if not ranks.is_first:
        return
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False), file=file)
    os.replace(fresh, path)

"""Pairs in, better pairs out: hard negatives found, pairs that an encoder does not believe or has seen enough dropped.

Each source is searched within its own documents, exactly, on the training device. Knows nothing of training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from models.spec import Side
from models.training.encoders import Shelf
from models.training.ranks import Ranks
from models.training.recipe import Diversify, Filter, Mine, Recipe
from models.training.rows import Pair, as_pairs, read_all
from models.training.tables import PairTable, Rows, Texts, TokenTable
from models.training.vectors import Kept, Reader, file_of, kept_in, take

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
    """Reads rows, and searches each of their sources with a pair of encoders."""

    def __init__(
        self,
        recipe: Recipe,
        stage: Mine | Filter | Diversify,
        files: list[Path],
        shelf: Shelf,
        vectors: Path,
        ranks: Ranks,
    ) -> None:
        self.rows = list(as_pairs(read_all(files), {}, recipe.seed))
        self.table = PairTable.of_pairs(self.rows)
        self._ranks, self._dim, self._stage = ranks, recipe.dim, stage
        self._shelf, self._vectors = shelf, vectors

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
        """The pairs of a source, each with the `depth` best of the source's documents."""
        pairs = self.table.sources[source]
        corpus = np.unique(
            np.concatenate([part.gather(pairs)[1] for part in (self.table.positives, self.table.negatives)])
        )
        known = take(self._documents, corpus, self._ranks.device)
        depth = min(depth, len(corpus))
        blocks = [pairs[first : first + QUERIES_AT_ONCE] for first in range(0, len(pairs), QUERIES_AT_ONCE)]
        for block in tqdm(blocks, desc=f"search {source}", unit="block", disable=None, leave=False):
            scores = self._asked(block) @ known.T
            best, places = (part.cpu().numpy() for part in torch.topk(scores, depth))
            owners, answers = self.table.positives.gather(block)
            # Only what is looked at leaves the device: a block's scores may be a gigabyte.
            where = (torch.from_numpy(part).to(scores.device) for part in (owners, np.searchsorted(corpus, answers)))
            own = scores[tuple(where)].cpu().numpy()
            firsts = np.cumsum(self.table.positives.sizes(block)) - self.table.positives.sizes(block)
            positives = np.maximum.reduceat(own, firsts)
            for at, pair in enumerate(block):
                yield Found(int(pair), corpus[places[at]], best[at], float(positives[at]))

    def side(self, side: Side) -> torch.Tensor:
        """All vectors of one side."""
        kept = self._queries if side is Side.QUERY else self._documents
        return take(kept, np.arange(len(kept)), self._ranks.device)

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
        path = file_of(self._vectors, self._shelf.fingerprint(name), texts)
        if path.is_file():
            return kept_in(path, len(texts), self._dim)
        encoder = self._shelf.open(name, trained=False)
        tokens = TokenTable.build(texts, encoder.spec, encoder.tokenizer, self._ranks.device)
        return Reader(encoder, self._ranks, tokens=READ_TOKENS, precision="bf16").keep(tokens, path)


def mine(
    recipe: Recipe, stage: Mine, files: list[Path], shelf: Shelf, vectors: Path, ranks: Ranks, out: Path
) -> dict[str, int]:
    """Writes the pairs with what was mined in place of their negatives; pairs that found none keep theirs."""
    searcher = Searcher(recipe, stage, files, shelf, vectors, ranks)
    rows, table = searcher.rows, searcher.table
    first, last = stage.ranks
    negatives: dict[int, list[str]] = {}
    for source in searcher.sources(stage.sources):
        # So many more are looked at as may turn out to be answers, of this pair or of another with the same query.
        most = int(table.answers.sizes(table.query[table.sources[source]]).max())
        for found in searcher.search(source, last + most):
            answer = np.isin(found.rows, table.answers[int(table.query[found.pair])])
            kept, scores = found.rows[~answer][first:last], found.scores[~answer][first:last]
            if stage.margin is not None:
                kept = kept[scores <= found.positive - stage.margin]
            chance = np.random.default_rng([recipe.seed, found.pair])
            drawn = np.sort(chance.choice(len(kept), size=min(stage.count, len(kept)), replace=False))
            negatives[found.pair] = [table.documents.texts[row] for row in kept[drawn]]
    write_pairs(out, ranks, ((row, negatives.get(number) or row.negatives) for number, row in enumerate(rows)))
    counts = [len(texts) for texts in negatives.values()]
    return {"pairs": len(rows), "mined": sum(count > 0 for count in counts), "negatives": sum(counts)}


def filter_pairs(
    recipe: Recipe, stage: Filter, files: list[Path], shelf: Shelf, vectors: Path, ranks: Ranks, out: Path
) -> dict[str, int]:
    """Writes the pairs of which a positive is among the first `top` found; other sources pass as they are."""
    searcher = Searcher(recipe, stage, files, shelf, vectors, ranks)
    rows, table = searcher.rows, searcher.table
    dropped: set[int] = set()
    for source in searcher.sources(stage.sources):
        for found in searcher.search(source, stage.top):
            if not np.isin(table.positives[found.pair], found.rows).any():
                dropped.add(found.pair)
    write_pairs(out, ranks, ((row, row.negatives) for number, row in enumerate(rows) if number not in dropped))
    return {"pairs": len(rows), "kept": len(rows) - len(dropped)}


def diversify(
    recipe: Recipe, stage: Diversify, files: list[Path], shelf: Shelf, vectors: Path, ranks: Ranks, out: Path
) -> dict[str, int]:
    """Writes the rows whose text is not like too many that were kept before it."""
    searcher = Searcher(recipe, stage, files, shelf, vectors, ranks)
    rows, table = searcher.rows, searcher.table
    kept = spread(searcher.side(stage.side), stage.neighbours, stage.threshold, stage.most, stage.seeds)
    firsts = table.positives.pick(np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64))
    texts = table.query if stage.side is Side.QUERY else firsts
    write_pairs(out, ranks, ((row, row.negatives) for number, row in enumerate(rows) if kept[texts[number]]))
    return {"pairs": len(rows), "kept": int(kept[texts].sum())}


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
    """A JSON-lines file, there whole or not at all; every rank has the same rows, and the first writes them."""
    if not ranks.is_first:
        return
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        for pair, negatives in rows:
            row: dict[str, object] = {"query": pair.query, "pos": pair.positives, "neg": negatives}
            row["source"] = pair.source
            if pair.instruction is not None:
                row["instruction"] = pair.instruction
            if pair.hypothetical:
                row["hypothetical"] = pair.hypothetical
            print(json.dumps(row, ensure_ascii=False), file=file)
    os.replace(fresh, path)

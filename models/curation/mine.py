"""Finds candidates for rows in a whole corpus: hard negatives (`mine`), or all that may answer a query (`pool`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from models.curation.frame import Outcome, Step, digest, in_blocks
from models.curation.rows import Row, is_document, passages_of, query_of, read_rows, read_sourced
from models.curation.search import AT_ONCE, Retrievers
from models.encoder.spec import Side
from models.errors import CareError
from models.lexical import Ranking
from models.negatives import draw_negatives

COUNT, RANKS, DEPTH = 7, (0, 100), 50
CONSISTENT = "consistent"


@dataclass(frozen=True)
class Mine(Step):
    """Adds `count` negatives from a window of ranks to those that a row has; answers of any row of the query are none.

    With `margin`, only what the encoder scores lower than the row's best positive by at least that. With `consistent`,
    rows none of whose positives is among the first ones found are dropped: the round trip of synthetic queries.
    """

    files: Sequence[Path]
    retrievers: Retrievers
    count: int = COUNT
    ranks: tuple[int, int] = RANKS
    margin: float | None = None
    within: Literal["all", "source"] = "all"
    consistent: int = 0
    seed: int = 0

    name = "mine"
    block = AT_ONCE

    def __post_init__(self) -> None:
        if not 0 <= self.ranks[0] < self.ranks[1]:
            raise CareError("--ranks: write FIRST LAST, the first rank that counts and the first that does not")
        if self.margin is not None and not self.retrievers.encoders:
            raise CareError("--margin compares cosines: give --encoder, too")

    def parameters(self) -> dict[str, Any]:
        own = {"count": self.count, "ranks": list(self.ranks), "margin": self.margin, "within": self.within}
        return {**own, CONSISTENT: self.consistent, "seed": self.seed, **self.retrievers.facts()}

    @cached_property
    def _answers(self) -> dict[str, set[int]]:
        """Corpus rows of the positives of every query, in whatever row of the files they stand."""
        found, rows = defaultdict[str, set[int]](set), self.retrievers.corpus.rows
        for row in read_rows(self.files):
            if row is not None:
                found[query_of(row)].update(rows[text] for text in passages_of(row) if text in rows)
        return found

    def read(self, files: Sequence[Path]) -> Iterator[Row | None]:
        return read_sourced(files) if self.within == "source" else read_rows(files)

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        depth = max(self.ranks[1] + max(map(len, self._answers.values()), default=0), self.consistent)
        for some in in_blocks(rows, self.block):
            for row, ranking in zip(some, self._rankings(some, depth), strict=True):
                yield self._mined(row, ranking)

    def _rankings(self, some: Sequence[Row], depth: int) -> list[Ranking]:
        """A ranking for each row; with `within` source, rows of one source search its documents together."""
        # What a row has already is found, too, and not counted.
        most = depth + max((len(row.get("neg", [])) for row in some), default=0)
        if self.within == "all":
            return self.retrievers.fused(some, most)
        by_source, found = defaultdict[str, list[int]](list), dict[int, Ranking]()
        for at, row in enumerate(some):
            by_source[row["source"]].append(at)
        for source, places in by_source.items():
            allowed = self.retrievers.corpus.of_source(source)
            if not allowed.any():
                raise CareError(f"--within source: the corpus has no document of {source!r}; use --within all")
            rankings = self.retrievers.fused([some[at] for at in places], most, allowed)
            found.update(zip(places, rankings, strict=True))
        return [found[at] for at in range(len(some))]

    def _mined(self, row: Row, ranking: Ranking) -> Outcome:
        query, positives, own = query_of(row), passages_of(row), row.get("neg", [])
        if not query:
            return Outcome(dropped="a document without a title: there is no query to search with")
        corpus = self.retrievers.corpus
        if self.consistent:
            first = {corpus.texts[at] for at in ranking[0][: self.consistent]}
            if not first & set(positives):
                return Outcome(dropped=f"no positive among the first {self.consistent}")
        known = [*self._answers[query], *(corpus.rows[text] for text in own if text in corpus.rows)]
        below: float | None = None
        scores = ranking[1]
        if self.margin is not None:
            dense = self.retrievers.dense[0]
            (asked,) = dense.ask([query], [row.get("hypothetical", [])])
            below = float((dense.encoder.read(positives, Side.DOCUMENT) @ asked).max()) - self.margin
            scores = dense.scores(asked, ranking[0])
        drawn = draw_negatives(
            ranking[0], np.array(known, np.int64), scores, ranks=self.ranks, count=self.count, below=below,
            chance=np.random.default_rng([self.seed, int(digest([query, positives]), 16)]),
        )  # fmt: skip
        mined = [corpus.texts[at] for at in drawn]
        notes = {"negatives mined": len(mined)} | ({} if mined else {"rows without a mined negative": 1})
        fields = {name: value for name, value in row.items() if name not in ("text", "title")}
        return Outcome([{**fields, "query": query, "pos": positives, "neg": [*own, *mined]}], notes=notes)


@dataclass(frozen=True)
class Pool(Step):
    """Gives each query the first `depth` documents of every system, to be judged; a document's text is a query.

    A row that has positives keeps them, and the pool stands among its negatives: an audit of its labels.
    """

    retrievers: Retrievers
    depth: int = DEPTH

    name = "pool"
    block = AT_ONCE

    def parameters(self) -> dict[str, Any]:
        return {"depth": self.depth, **self.retrievers.facts()}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        texts = self.retrievers.corpus.texts
        for some in in_blocks(rows, self.block):
            asked = [{**row, "query": row["text"], "pos": []} if is_document(row) else row for row in some]
            asked = [{name: value for name, value in row.items() if name not in ("text", "title")} for row in asked]
            for row, *rankings in zip(asked, *self.retrievers.search(asked, self.depth), strict=True):
                found = dict.fromkeys([*row["pos"], *row.get("neg", [])])
                ranks = (texts[at] for ranking in rankings for at in ranking[0])
                new = list(dict.fromkeys(text for text in ranks if text not in found))
                if not found and not new:
                    yield Outcome(dropped="nothing found")
                    continue
                # Without labels all stand as positives: a row needs one, and a judge tells them apart.
                side = "neg" if row["pos"] else "pos"
                yield Outcome([{**row, side: [*row.get(side, []), *new]}], notes={"passages pooled": len(new)})

"""Training texts as rows, tokenised once. Knows nothing of encoders' weights, of batches or of losses.

Token ids lie in one flat tensor on the training device, so that a batch is one gather and an epoch never meets the
tokenizer again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from models.errors import BadData
from models.spec import EncoderSpec, Side
from models.tokenizer import Tokenizer
from models.training.rows import Pair
from models.training.tokenise import AT_ONCE, tokenise

Rows = NDArray[np.int64]
Padded = tuple[torch.Tensor, torch.Tensor]
"""Ids and attention mask, both (texts, longest)."""


class Ragged:
    """A list of rows for each row, in two flat arrays."""

    def __init__(self, starts: Rows, values: Rows) -> None:
        self.starts, self.values = starts, values

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        sizes = np.fromiter((len(rows) for rows in lists), np.int64, len(lists))
        values = np.fromiter((row for rows in lists for row in rows), np.int64, int(sizes.sum()))
        return cls(np.concatenate([[0], np.cumsum(sizes)]), values)

    def __getitem__(self, row: int) -> Rows:
        rows: Rows = self.values[self.starts[row] : self.starts[row + 1]]
        return rows

    def sizes(self, rows: Rows) -> Rows:
        sizes: Rows = self.starts[rows + 1] - self.starts[rows]
        return sizes

    def pick(self, rows: Rows, places: Rows) -> Rows:
        """One value of each of these rows, by its place in the row."""
        values: Rows = self.values[self.starts[rows] + places]
        return values

    def gather(self, rows: Rows) -> tuple[Rows, Rows]:
        """All values of these rows, and of each the position in `rows` that it belongs to."""
        sizes = self.sizes(rows)
        owners = np.repeat(np.arange(len(rows)), sizes)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return owners, self.values[self.starts[rows][owners] + within]


@dataclass(frozen=True)
class Texts:
    """Texts of one side, each once; `instructions` may overrule what an encoder puts before its queries."""

    side: Side
    texts: list[str]
    instructions: list[str | None] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def as_read_by(self, spec: EncoderSpec, rows: range) -> list[str]:
        own = spec.instruction(self.side)
        if self.instructions is None:
            return [own + self.texts[row] for row in rows]
        given = ((self.instructions[row], self.texts[row]) for row in rows)
        return [(own if instruction is None else instruction) + text for instruction, text in given]


@dataclass(frozen=True)
class PairTable:
    """All pairs as rows into two lists of texts; `sources[name]` are the pairs of one source."""

    queries: Texts
    documents: Texts
    query: Rows
    """The query row of each pair."""
    positives: Ragged
    negatives: Ragged
    hypothetical: Ragged
    """Document rows that are read together with the query."""
    sources: dict[str, Rows]

    def __len__(self) -> int:
        return len(self.query)

    def check_sources(self, key: str, named: Iterable[str]) -> None:
        """A key of the recipe that names a source of which there is no row would do nothing, unseen."""
        for source in named:
            if source not in self.sources:
                raise BadData(f"{key}: no row is of {source!r}; the files have {', '.join(sorted(self.sources))}")

    @cached_property
    def answers(self) -> Ragged:
        """The document rows that answer each query row, whichever pair says so."""
        owners, documents = self.positives.gather(np.arange(len(self)))
        known = np.unique(self.query[owners] * len(self.documents) + documents)
        starts = np.searchsorted(known, np.arange(len(self.queries) + 1) * len(self.documents))
        return Ragged(starts, known % len(self.documents))

    @classmethod
    def of_pairs(cls, pairs: Iterable[Pair]) -> PairTable:
        queries: dict[tuple[str | None, str], int] = {}
        documents: dict[str, int] = {}
        asked: list[int] = []
        lists: tuple[list[list[int]], ...] = ([], [], [])
        sources: dict[str, list[int]] = {}
        for pair in pairs:
            sources.setdefault(pair.source, []).append(len(asked))
            asked.append(queries.setdefault((pair.instruction, pair.query), len(queries)))
            for rows, texts in zip(lists, (pair.positives, pair.negatives, pair.hypothetical), strict=True):
                rows.append([documents.setdefault(text, len(documents)) for text in texts])
        return cls._checked(
            Texts(Side.QUERY, [query for _, query in queries], [instruction for instruction, _ in queries]),
            Texts(Side.DOCUMENT, list(documents)),
            np.asarray(asked, dtype=np.int64),
            (Ragged.of(lists[0]), Ragged.of(lists[1]), Ragged.of(lists[2])),
            sources,
        )

    @classmethod
    def of_texts(cls, texts: Iterable[tuple[str, str]]) -> PairTable:
        """Each text is a query whose document is itself; a text belongs to the source that it came from first."""
        sources: dict[str, list[int]] = {}
        seen: dict[str, None] = {}
        for text, source in texts:
            if text not in seen:
                sources.setdefault(source, []).append(len(seen))
                seen[text] = None
        unique = list(seen)
        own, none = Ragged(np.arange(len(unique) + 1), np.arange(len(unique))), Ragged.of([[]] * len(unique))
        return cls._checked(
            Texts(Side.QUERY, unique), Texts(Side.DOCUMENT, unique), own.values, (own, none, none), sources
        )

    @classmethod
    def _checked(
        cls,
        queries: Texts,
        documents: Texts,
        asked: Rows,
        lists: tuple[Ragged, Ragged, Ragged],
        sources: dict[str, list[int]],
    ) -> PairTable:
        if len(asked) == 0:
            raise BadData("the stage's files hold no training rows")
        arrays = {name: np.asarray(rows, dtype=np.int64) for name, rows in sources.items()}
        return cls(queries, documents, asked, *lists, arrays)


class TokenTable:
    """Token ids of many texts in one flat tensor on the training device."""

    def __init__(self, ids: torch.Tensor, starts: torch.Tensor, lengths: Rows) -> None:
        self.ids, self.starts, self.lengths = ids, starts, lengths

    @classmethod
    def build(cls, texts: Texts, spec: EncoderSpec, tokenizer: Tokenizer, device: torch.device) -> TokenTable:
        # Hardly a text has more than eight characters to a token (English has four or five); cutting first spares the
        # tokenizer what nobody reads.
        longest = 8 * tokenizer.max_length
        chunks = (
            [text[:longest] for text in texts.as_read_by(spec, range(first, min(first + AT_ONCE, len(texts))))]
            for first in range(0, len(texts), AT_ONCE)
        )
        found = tokenise(chunks, len(texts), tokenizer)
        total = -(-len(texts) // AT_ONCE)
        bar = tqdm(found, f"tokenise, {texts.side}", total, unit="chunk", disable=None, leave=False)
        ids, sizes = zip(*bar, strict=True)
        lengths = np.concatenate(sizes).astype(np.int64)
        places = torch.from_numpy(np.cumsum(lengths) - lengths)
        return cls(torch.from_numpy(np.concatenate(ids)).to(device), places.to(device), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Rows) -> Padded:
        """Ids and mask (rows, longest), padded on the right with 0."""
        device = self.ids.device
        where = torch.from_numpy(rows).to(device)
        lengths = torch.from_numpy(self.lengths[rows]).to(device)
        columns = torch.arange(int(self.lengths[rows].max()), device=device)
        mask = columns < lengths[:, None]
        places = (self.starts[where][:, None] + columns).clamp(max=len(self.ids) - 1)
        return self.ids[places].long() * mask, mask.long()

    def flat(self, rows: Rows) -> torch.Tensor:
        """The ids of these rows end to end, without padding."""
        lengths = self.lengths[rows]
        total = int(lengths.sum())
        before = torch.from_numpy(np.cumsum(lengths) - lengths).to(self.ids.device)
        shifts = self.starts[torch.from_numpy(rows).to(self.ids.device)] - before
        owners = torch.from_numpy(lengths).to(self.ids.device)
        places = torch.repeat_interleave(shifts, owners, output_size=total)
        return self.ids[places + torch.arange(total, device=self.ids.device)]

    def chunks(self, rows: Rows, tokens: int) -> list[Rows]:
        """Positions in `rows`, texts of like lengths together, at most `tokens` padded tokens a chunk."""
        return chunks_of(self.lengths[rows], tokens)


def chunks_of(lengths: Rows, tokens: int) -> list[Rows]:
    """Positions, longest first, in groups whose padded size stays within the budget (or that are one text)."""
    order = np.argsort(-lengths, kind="stable")
    groups, first = [], 0
    while first < len(order):
        size = max(1, tokens // max(1, int(lengths[order[first]])))
        groups.append(order[first : first + size])
        first += size
    return groups

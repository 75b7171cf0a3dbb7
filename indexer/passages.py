"""Cuts documents into passages by tokens, preferably at sentence ends, and reads passage texts back from disk.

The encoder reads title + newline + passage, so every passage carries its document's title, whose tokens count; if one
of the two is missing, it reads the other alone. Spans are characters of the document's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from indexer.errors import BadBuild
from indexer.store.arrays import Array
from indexer.store.documents import Documents, Passages, Span
from models.encoder.tokenizer import Tokenizer

SENTENCE_ENDS = frozenset("。！？；!?;\n")
# How far back from the budget's end a sentence end is looked for, as a share of the budget.
SEARCH_BACK = 0.25
BLOCK = 8192
OVERLAP = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens that the encoder reads of one passage, title and instruction included, and tokens neighbours share."""

    tokens: int
    overlap: int

    def __post_init__(self) -> None:
        if self.overlap < 0 or self.overlap * 4 > self.tokens:
            most = f"at most a quarter; give --overlap 0 to {self.tokens // 4}"
            raise BadBuild(f"an overlap of {self.overlap} tokens does not go with passages of {self.tokens}: {most}")

    @staticmethod
    def of(tokens: int, overlap: int | None) -> Budget:
        """`overlap` None: OVERLAP, or a quarter of a shorter passage."""
        return Budget(tokens, min(OVERLAP, tokens // 4) if overlap is None else overlap)


class Cutter:
    """Cuts by one tokenizer and one budget; `instruction` is what the encoder reads before every document."""

    def __init__(self, tokenizer: Tokenizer, instruction: str, budget: Budget) -> None:
        self._tokenizer = tokenizer
        self._instruction = instruction
        self._budget = budget
        # The title may take half of what the fixed tokens leave.
        fixed = len(tokenizer(instruction))
        self._special_tokens = len(tokenizer(""))
        self._title_tokens = (budget.tokens - fixed) // 2
        if self._title_tokens < 1 or budget.overlap >= self._title_tokens:
            raise BadBuild(f"passages of {budget.tokens} tokens leave no room beside {fixed} fixed ones: allow more")

    def cut(self, titles: Sequence[str], texts: Sequence[str]) -> list[list[Span]]:
        """Returns the passages of each document, in order, at least one; together they cover the text."""
        whole = [self._instruction + self.compose(title, text) for title, text in zip(titles, texts, strict=True)]
        spans = []
        for title, text, tokens in zip(titles, texts, self._tokenizer.batch(whole), strict=True):
            fits = not tokens.truncated and len(tokens) <= self._budget.tokens
            spans.append([(0, len(text))] if fits or not text else self._cut_long(title, text))
        return spans

    def compose(self, title: str, passage: str) -> str:
        """Returns the text that the encoder reads of a passage, without the instruction; a very long title is cut."""
        if not title:
            return passage
        offsets = self._tokenizer.offsets(title)
        if len(offsets) > self._title_tokens:
            title = title[: offsets[self._title_tokens][0]]
        return f"{title}\n{passage}" if passage else title

    def _cut_long(self, title: str, text: str) -> list[Span]:
        offsets = self._tokenizer.offsets(text)
        starts = [start for start, _ in offsets] + [len(text)]  # what lies between two tokens goes with the first
        room = self._budget.tokens - self._count(title, "")
        spans: list[Span] = []
        first = 0
        while True:
            start = starts[first] if spans else 0
            last = min(first + room, len(offsets))
            if last < len(offsets):
                ends = range(last, last - int(room * SEARCH_BACK), -1)
                last = next((token for token in ends if _ends_sentence(text, offsets, token)), last)
            # A piece can have more tokens than the same stretch of the whole (a word cut in two): shrink it.
            while (
                last > first + 1
                and (excess := self._count(title, text[start : starts[last]]) - self._budget.tokens) > 0
            ):
                last = max(first + 1, last - excess)
            spans.append((start, starts[last]))
            if last >= len(offsets):
                return spans
            # The next passage begins with a sentence if one begins in the earlier half of the overlap.
            earliest = max(first + 1, last - self._budget.overlap)
            begins = range(earliest, last - self._budget.overlap // 2)
            first = next((token for token in begins if _ends_sentence(text, offsets, token)), earliest)

    def _count(self, title: str, passage: str) -> int:
        """Tokens that the encoder would read without truncation, special ones included."""
        text = self._instruction + self.compose(title, passage)
        return len(self._tokenizer.offsets(text)) + self._special_tokens


def _ends_sentence(text: str, offsets: Sequence[Span], token: int) -> bool:
    """Returns whether a sentence ends right before this token."""
    end = offsets[token - 1][1]
    final, gap = text[end - 1], text[end : offsets[token][0]]
    # A full stop ends a sentence only before a space: 3.5 is a number.
    return final in SENTENCE_ENDS or "\n" in gap or (final == "." and gap != "")


def passage_texts(documents: Documents, passages: Passages, rows: Sequence[int] | Array) -> Iterator[tuple[str, str]]:
    """Reads title and text of the passages in ascending `rows`; parses a document once for all its passages."""
    at, title, text = -1, "", ""
    for start in range(0, len(rows), BLOCK):
        block = np.asarray(rows[start : start + BLOCK])
        for row, document_row in zip(block.tolist(), passages.documents[block].tolist(), strict=True):
            if document_row != at:
                document = documents.get(document_row)
                at, title, text = document_row, document.title, document.text
            first, end = passages.span(row)
            yield title, text[first:end]

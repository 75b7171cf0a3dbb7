"""The part of a passage that shows why it was found, and which of its characters the query matches.

Knows texts and the lexical index's terms; nothing of documents, rows or HTTP.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from models.lexical import terms

WINDOW = 120
# A cut inside a word moves by at most this many characters to the word's end.
LONGEST_WORD = 20
ELLIPSIS = "…"
# Characters that end something: a snippet that was cut out of a text does not begin with them.
NO_BEGINNING = frozenset("，。、；：！？）】》”’,.;:!?) \t\n\u3000")

Range = tuple[int, int]
Match = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Snippet:
    """`highlights` are ranges of `text` in characters (code points), sorted and apart from each other."""

    text: str
    highlights: list[Range]


class _Folding(dict[int, str]):
    """Each character as the lexical index reads it, where that is again one character."""

    def __missing__(self, point: int) -> str:
        folded = unicodedata.normalize("NFKC", chr(point)).lower()
        self[point] = folded if len(folded) == 1 else chr(point)
        return self[point]


_FOLDING = _Folding()
# Letters, digits and ideographs in another shape: raised, circled, compatible, full-width. Folding every text would
# take longer than everything else here, and few texts have any.
_OTHER_SHAPES = re.compile("[²³¹\u2070-\u209f\u2460-\u24ff\uf900-\ufaff\uff10-\uff19\uff21-\uff3a\uff41-\uff5a]")


def marked_terms(query: str) -> list[str]:
    """What to mark for a query: its terms without single characters, which would mark half of a Chinese text."""
    distinct = [term for term in dict.fromkeys(terms(query)) if len(term) <= WINDOW]
    return [term for term in distinct if len(term) > 1] or distinct


def make_snippet(text: str, span: Range, wanted: Sequence[str]) -> Snippet:
    """At most about WINDOW characters of the passage `span` of a text, around as many different terms as fit."""
    passage = text[slice(*span)]
    matches = _find(_fold(passage), wanted)
    start, end = (0, len(passage)) if len(passage) <= WINDOW else _window(passage, matches)
    while start < end and passage[start] in NO_BEGINNING:
        start += 1
    before = ELLIPSIS if span[0] + start > 0 else ""
    after = ELLIPSIS if span[0] + end < len(text) else ""
    inside = [(a, b) for a, b, _ in matches if a >= start and b <= end]
    return Snippet(before + passage[start:end] + after, _merge(inside, len(before) - start))


def _fold(text: str) -> str:
    """The text as the lexical index reads it, character for character, so that positions stay."""
    if not _OTHER_SHAPES.search(text):
        lower = text.lower()
        if len(lower) == len(text):
            return lower
    return text.translate(_FOLDING)


def _find(text: str, wanted: Sequence[str]) -> list[Match]:
    """Where the terms stand, in order of position: start, end, term."""
    found = []
    for term in wanted:
        position = text.find(term)
        while position >= 0:
            end = position + len(term)
            if not term.isascii() or _is_word(text, position, end):
                found.append((position, end, term))
            position = text.find(term, position + 1)
    found.sort()
    return found


def _is_word(text: str, start: int, end: int) -> bool:
    """Whether no letter or digit of the same script continues the term: `in` is not a match inside `aspirin`."""
    before, after = text[start - 1 : start], text[end : end + 1]
    return not (before.isascii() and before.isalnum()) and not (after.isascii() and after.isalnum())


def _window(text: str, matches: Sequence[Match]) -> Range:
    """The range of WINDOW characters with the most different terms, then the most matches, then the first."""
    if not matches:
        return 0, _end_of_word(text, WINDOW)
    first, end = _densest(matches)
    start = max(0, min(first - (WINDOW - (end - first)) // 2, len(text) - WINDOW))
    return _start_of_word(text, start, first), max(end, _end_of_word(text, start + WINDOW))


def _densest(matches: Sequence[Match]) -> Range:
    """From where to where the matches of the best window reach. One pass, `last` running ahead of `first`."""
    best, chosen = (0, 0), (0, 0)
    count: dict[str, int] = {}
    last = 0
    for first, (start, _, term) in enumerate(matches):
        while last < len(matches) and matches[last][1] <= start + WINDOW:
            count[matches[last][2]] = count.get(matches[last][2], 0) + 1
            last += 1
        if (len(count), last - first) > best:
            best, chosen = (len(count), last - first), (first, last)
        if count[term] == 1:
            del count[term]
        else:
            count[term] -= 1
    return matches[chosen[0]][0], max(end for _, end, _ in matches[slice(*chosen)])


def _start_of_word(text: str, start: int, limit: int) -> int:
    """The next position from `start` on that does not cut a Latin word, or `start` where none is near."""
    for position in range(start, min(limit, start + LONGEST_WORD) + 1):
        if not _inside_word(text, position):
            return position
    return start


def _end_of_word(text: str, end: int) -> int:
    for position in range(min(end, len(text)), max(0, end - LONGEST_WORD), -1):
        if not _inside_word(text, position):
            return position
    return end


def _inside_word(text: str, position: int) -> bool:
    around = text[max(0, position - 1) : position + 1]
    return len(around) == 2 and position > 0 and around.isascii() and around.isalnum()


def _merge(ranges: Sequence[Range], shift: int) -> list[Range]:
    """Sorted ranges moved by `shift`, with those that touch or overlap made one."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and start + shift <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end + shift))
        else:
            merged.append((start + shift, end + shift))
    return merged

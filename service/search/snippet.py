"""The part of a passage that shows why it was found, and which of its characters the query matches.

Knows texts and the lexical index's terms; nothing of documents, rows or HTTP.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from models.lexical import query_terms

# Characters of a snippet. A line of Latin letters says about half of what a line of Chinese says.
WINDOW = 120
LATIN_WINDOW = 240
# More terms than any question has: a page of text sent as a query must not hold up the event loop.
MAX_TERMS = 64
# A cut inside a word moves by at most this many characters to the word's end.
LONGEST_WORD = 20
ELLIPSIS = "…"
# Characters that end something: a snippet that was cut out of a text does not begin with them.
NO_BEGINNING = frozenset("，。、；：！？）】》”’,.;:!?) \t\n\u3000")
# Where something begins that can be read by itself: after the end of a sentence, or else of a clause. A full stop
# ends a sentence only before a space: 3.5 is a number.
_SENTENCE = re.compile(r"[。！？\n]+[”’）」』\s]*|[.!?][\"')]*\s+")
_CLAUSE = re.compile(r"[；，：;,:]\s*")
# Words that carry a sentence and no topic. A pair of Chinese characters that holds one of these stands for no word.
_PARTICLES = frozenset("的了是与或也很就")
_SMALL_WORDS = frozenset(
    ["to", "of", "in", "on", "for", "and", "or", "with", "my", "it", "be", "at", "by", "from", "as"]
)

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
    """What to mark for a query: its terms but for question words and particles.

    Single characters are left out too, unless there is nothing else: they would mark half of a Chinese text.
    """
    distinct = [term for term in dict.fromkeys(query_terms(query)) if len(term) <= WINDOW]
    telling = [term for term in distinct if len(term) > 1 and term not in _SMALL_WORDS]
    return ([term for term in telling if not _PARTICLES.intersection(term)] or telling or distinct)[:MAX_TERMS]


def make_snippet(text: str, span: Range, wanted: Sequence[str]) -> Snippet:
    """About as many characters of the passage `span` of a text as a window takes, around its densest matches."""
    passage = text[slice(*span)]
    matches = _find(_fold(passage), wanted)
    # In UTF-8 a Chinese character takes three bytes, a Latin letter one.
    width = LATIN_WINDOW if len(passage.encode()) < 1.5 * len(passage) else WINDOW
    begins_sentence = span[0] == 0 or _SENTENCE.fullmatch(text[span[0] - 1 : span[0]]) is not None
    start, end = (0, len(passage))
    if len(passage) > width:
        start, end = _window(passage, matches, width, begins_sentence=begins_sentence)
    while start < end and passage[start] in NO_BEGINNING:
        start += 1
    while start < end and passage[end - 1].isspace():
        end -= 1
    before = ELLIPSIS if span[0] + start > 0 else ""
    after = ELLIPSIS if span[1] < len(text) or passage[end:].strip() else ""
    inside = [(a, b) for a, b, _ in matches if a >= start and b <= end]
    # Three replaces take a tenth of what one translate takes.
    shown = passage[start:end].replace("\n", " ").replace("\r", " ").replace("\t", " ")
    return Snippet(before + shown + after, _merge(inside, len(before) - start))


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


def _window(text: str, matches: Sequence[Match], width: int, *, begins_sentence: bool) -> Range:
    """The range of `width` characters with the most different terms, then the most matches, then the first.

    It begins with a sentence or a clause where one begins near enough, and ends with one on the same terms.
    """
    first, last = _densest(matches, width) if matches else (0, 0)
    centred = max(0, min(first - (width - (last - first)) // 2, len(text) - width))
    # Anything earlier would push the last match out; without a match, anything later would hide too much.
    earliest, latest = max(0, last - width - width // 6), first if matches else width // 3
    beginnings = _beginnings(text, earliest, latest, begins_sentence=begins_sentence)
    start = min(beginnings, key=lambda position: abs(position - centred), default=centred)
    start = _start_of_word(text, start, max(first, start))
    limit = min(len(text), max(last, start + width))
    if limit == len(text):
        return start, limit
    ends = [found.end() for found in _SENTENCE.finditer(text, max(last - 1, start + width * 2 // 3), limit)]
    return start, ends[-1] if ends else max(last, _end_of_word(text, limit))


def _beginnings(text: str, earliest: int, latest: int, *, begins_sentence: bool) -> list[int]:
    """Where sentences, or else clauses, begin between two positions, both included."""
    for boundary in (_SENTENCE, _CLAUSE):
        # A boundary lies before what it begins.
        found = [match.end() for match in boundary.finditer(text, max(0, earliest - 1), latest)]
        found = [position for position in found if position >= earliest]
        if earliest == 0 and begins_sentence:
            found.append(0)
        if found:
            return found
    return []


def _densest(matches: Sequence[Match], width: int) -> Range:
    """From where to where the matches of the best window reach. One pass, `last` running ahead of `first`."""
    best, chosen = (0, 0), (0, 0)
    count: dict[str, int] = {}
    last = 0
    for first, (start, _, term) in enumerate(matches):
        while last < len(matches) and matches[last][1] <= start + width:
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

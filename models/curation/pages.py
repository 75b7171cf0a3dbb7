"""Removes what a page of a book has beside its text: running heads, page numbers, captions, citations, marks of OCR."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from models.curation.rows import Row, passages_of

# A number, a rule, or what a program for text recognition printed.
_NUMBER = re.compile(
    r"\W{0,3}(?:page|p\.|第)?\s?\d{1,4}\s?页?(?:\s?(?:/|of|，?共)\s?\d{1,4}\s?页?)?\W{0,3}"
    r"|[-=_*~·. ]{3,}|.*torch\.Size\(.*",
    re.IGNORECASE,
)
# "Figure 3 shows that" and 图3显示 begin sentences.
_CAPTION = re.compile(
    r"\W{0,3}(?i:fig(?:ure)?s?\.?|table|图|表|圖)\s?\d{1,3}(?:[-–.．]\d{1,3}){0,2}(?:\s?[.:：。|]|\s+(?![a-z])|$)"
)
# [3], [3,5-7], (Smith et al., 2010; Li & Wang 2011). An interval has decimal points: [0.8, 1.2].
_CITATION = re.compile(
    r"\s?\[\d{1,3}(?:\s?[-–,，、]\s?\d{1,3}){0,20}\]"
    r"|\s?\((?:[A-Z][\w'-]{1,30}(?: (?:and|&) [A-Z][\w'-]{1,30}| et al\.)?,? [12]\d{3}[a-f]?(?:; )?){1,10}\)"
)
_REFERENCE = re.compile(r"\[\d{1,3}\]")  # at the beginning of a line: an entry of the bibliography
# <|ref|>text<|/ref|><|det|>[[66, 12, 930, 80]]<|/det|>: the kind of a region, and its place on the page.
_REGION = re.compile(r"<\|ref\|>[^<]{0,40}<\|/ref\|>|<\|det\|>[^<]{0,200}<\|/det\|>")
_MARKDOWN = re.compile(r"^#{1,6} +|\*\*")
_DIGITS = re.compile(r"[\d\W]+")
HEAD_LINES, HEAD_CHARACTERS, HEAD_PAGES = 2, 60, 3
"""A line among this many first or last ones, of at most this length, on this many pages of a source."""

Head = tuple[str, str]
"""A source, and a line without digits, spaces and punctuation."""


def running_heads(pages: Iterable[Row]) -> set[Head]:
    """The lines that pages of one source have in common at their ends."""
    seen = Counter[Head]()
    for page in pages:
        for text in passages_of(page):
            lines = _lines(text)
            seen.update({_head(page, lines[index]) for index in _ends(lines)})
    return {head for head, count in seen.items() if count >= HEAD_PAGES and head[1]}


def text_of_page(page: Row, text: str, heads: set[Head], notes: Counter[str]) -> str:
    """The text without the rest of the page; counts in `notes` what was found."""
    lines = _lines(text)
    ends = [index for index in _ends(lines) if _head(page, lines[index]) in heads]
    kept = list[str]()
    for index, line in enumerate(lines):
        if index in ends:
            notes["running heads"] += 1
        elif line and _NUMBER.fullmatch(line):
            notes["page numbers and rules"] += 1
        elif _CAPTION.match(line):
            notes["captions"] += 1
        elif _REFERENCE.match(line):
            notes["references"] += 1
        else:
            plain, found = _CITATION.subn("", line)
            if found:
                notes["citations"] += found
            kept.append(plain)
    return "\n".join(kept)


def _lines(text: str) -> list[str]:
    return [_MARKDOWN.sub("", line.strip()) for line in _REGION.sub("", text).split("\n")]


def _ends(lines: Sequence[str]) -> Iterator[int]:
    """The places of the short lines at both ends of a page."""
    filled = [index for index, line in enumerate(lines) if line]
    # A page of few lines is text: one that has only a head is taken for a short passage.
    if len(filled) <= 2 * HEAD_LINES:
        return iter(())
    return (index for index in (*filled[:HEAD_LINES], *filled[-HEAD_LINES:]) if len(lines[index]) <= HEAD_CHARACTERS)


def _head(page: Row, line: str) -> Head:
    return page["source"], _DIGITS.sub("", line).casefold()

"""Cleans texts: entities, tags, control characters, white space, boilerplate lines; drops what is too short or long."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.curation.extract import without_entities
from models.curation.frame import Outcome, Step
from models.curation.pages import Head, running_heads, text_of_page
from models.curation.rows import Row, missing_text, read_rows, read_sourced, with_texts
from models.errors import CareError
from models.rows import count_units

# Known names only: `a<b and c>d` is not a tag.
_TAG = re.compile(
    r"</?(?:a|b|i|u|p|br|hr|em|h[1-6]|html|head|body|li|ol|ul|td|th|tr|div|img|sub|sup|font|span|strong|table|tbody|script|style)"
    r"(?:\s[^<>=]{1,40}=[^<>]{0,300})?\s?/?>",
    re.IGNORECASE,
)
# C0 and C1 but tab and newline, zero-width and direction marks, soft hyphen, private use, replacement character.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufff9-\ufffd\ue000-\uf8ff\ud800-\udfff]"
)
# Ends before the next image begins: otherwise a text of many half images takes the square of its length.
_IMAGE = re.compile(r"!\[[^\[\]\n]*\]\([^)\s!]*\)")
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+")
_SPACES = re.compile(r"[ \t\u00a0\u2000-\u200a\u202f\u3000]+")
_BLANK_LINES = re.compile(r"\n{3,}")
_WORD = re.compile(r"[^\W_]")
# A line of a page around the text: short, and holding one of these.
BOILERPLATE = (
    r"版权所有|未经(?:授权|许可|允许)|转载请|责任编辑|免责声明|(?:扫一扫|扫码|扫描二维码)|关注.{0,12}公众号",
    r"点击(?:查看|阅读|进入|咨询|下载)|(?:上|下)一(?:篇|页)[:：]|相关(?:阅读|文章|推荐)[:：]?$|阅读全文|ICP备\S*号",
    r"copyright|all rights reserved|privacy policy|terms of (?:use|service)|accept (?:all )?cookies",
    r"^(?:share|print|subscribe|sign up|log ?in|read more|skip to (?:main )?content|back to top)\b.{0,30}$",
)
BOILERPLATE_CHARACTERS = 100
WORD_SHARE = 0.3
"""Texts with a smaller share of letters, digits and Chinese characters are dropped."""
# One character can be a text: 癌 is a term.
SHORTEST_UNITS, LONGEST_UNITS = 1, 10_000


@dataclass(frozen=True)
class Clean(Step):
    """`shortest` and `longest` are words and Chinese characters; `boilerplate` are patterns beside our own.

    With `book` every row is a page of the book that its `source` names.
    """

    shortest: int = SHORTEST_UNITS
    longest: int = LONGEST_UNITS
    boilerplate: Sequence[str] = ()
    book: bool = False
    _lines: re.Pattern[str] = field(init=False, repr=False)
    _heads: set[Head] = field(default_factory=set, init=False, repr=False)

    name = "clean"

    def __post_init__(self) -> None:
        try:
            lines = re.compile("|".join((*BOILERPLATE, *self.boilerplate)), re.IGNORECASE)
        except re.error as error:
            raise CareError(f"--boilerplate: not a regular expression: {error}") from error
        object.__setattr__(self, "_lines", lines)

    def parameters(self) -> dict[str, Any]:
        own = {"shortest": self.shortest, "longest": self.longest, "boilerplate": list(self.boilerplate)}
        return {**own, "book": True} if self.book else own

    def read(self, files: Sequence[Path]) -> Iterator[Row | None]:
        if self.book:  # in a first pass, because page 1 has its running head, too
            self._heads.update(running_heads(row for row in read_sourced(files) if row))
            return read_sourced(files)
        return read_rows(files)

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        return map(self._clean, rows)

    def _clean(self, row: Row) -> Outcome:
        reasons, notes = list[str](), Counter[str]()

        def change(text: str) -> str | None:
            page = text_of_page(row, text, self._heads, notes) if self.book else text
            cleaned = self.text(page, notes)
            reason = self._fault(cleaned)
            if reason:
                reasons.append(reason)
            return None if reason else cleaned

        cleaned = with_texts(row, change)
        if missing := missing_text(cleaned):
            return Outcome(dropped=f"{missing}: {reasons[-1]}")
        notes.update(f"text removed: {reason}" for reason in reasons)
        return Outcome([cleaned], notes=notes)

    def text(self, text: str, notes: Counter[str]) -> str:
        """The cleaned text; counts in `notes` what was found."""
        plain = _IMAGE.sub(" ", _TAG.sub(" ", without_entities(without_entities(text))))
        plain = _CONTROL.sub("", plain.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n"))
        if plain != text:
            notes["texts with entities, tags, images or control characters"] += 1
        lines = [_SPACES.sub(" ", line).strip() for line in plain.split("\n")]
        kept = [line for line in lines if len(line) > BOILERPLATE_CHARACTERS or not self._lines.search(line)]
        if len(lines) > len(kept):
            notes["boilerplate lines"] += len(lines) - len(kept)
        return _BLANK_LINES.sub("\n\n", "\n".join(kept)).strip()

    def _fault(self, text: str) -> str:
        units = count_units(text)
        if not text:
            return "empty"
        if units < self.shortest:
            return f"shorter than {self.shortest} words or characters"
        if units > self.longest:
            return f"longer than {self.longest} words or characters"
        if _ADDRESS.fullmatch(text):
            return "only an address"
        few = len(_WORD.findall(text)) < WORD_SHARE * len(text)
        return "hardly any letters" if few else ""

"""Takes Chinese passages out of files of any text format: one extractor for all of them, by rules on lines."""

from __future__ import annotations

import gzip
import html
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence

LINE_SHARE, PASSAGE_SHARE = 0.1, 0.4
"""The least share of Chinese characters in what is no space: code and the original of a translation have less."""
SHORTEST_CHARACTERS, JOINED_CHARACTERS, LONGEST_CHARACTERS = 10, 120, 900
"""Neighbouring lines are joined until a passage has the second, and cut at sentences to have at most the third."""
MEMBER_BYTES = 1 << 27

_CHINESE = re.compile(r"[\u3400-\u9fff]")
_SOLID = re.compile(r"\S")
_UNSEEN = re.compile(r"<(script|style|head|pre)\b|<!--|^```", re.MULTILINE | re.I)
"""Beginnings of parts that no reader sees."""
_ENDS = {name: re.compile(rf"</{name}\s*>", re.I) for name in ("script", "style", "head", "pre")} | {
    "<!--": re.compile("-->"),
    "```": re.compile("^```", re.MULTILINE),
}
_BLOCK = re.compile(r"</?(?:p|div|br|li|[uo]l|d[dlt]|t[rdh]|table|h\d|section|para|title|page|item)\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[a-z][^<>]*>|<[?!][^<>]*>", re.I)
# No part goes beyond the next bracket: each of many beginnings without an end would look for it to the end of the file.
_LINK = re.compile(r"!\[[^\[\]]*\]\([^)\[]*\)|\[([^\[\]]*)\](?:\([^)\[]*\)|\[[^\[\]]*\])")
_ROFF = re.compile(r"\\f[A-Z]|^[.'][A-Za-z]{1,3}\b ?|^[.']?\\\".*|\\&|\\(?=-)", re.MULTILINE)
_MARKS = re.compile(
    r"[*`]+|\b_+|(?<!_)_+\b|^[ \t]*(?:[#>]+|[-+*]|={2,}|\.\. )[ \t]*|\x1b\[[\d;]*m|\{\\[^{}]*\}", re.MULTILINE
)
_SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "Delta": "Δ", "mu": "μ", "pm": "±", "times": "×",
    "cdot": "·", "circ": "°", "degree": "°", "ge": "≥", "geq": "≥", "le": "≤", "leq": "≤", "approx": "≈", "sim": "~",
    "to": "→", "rightarrow": "→", "uparrow": "↑", "downarrow": "↓",
}  # fmt: skip
_TEX = re.compile(
    r"(?<!\\)(?:\\\\)*%.*"  # a comment
    r"|(?P<gap>\\\\(?:\[[^\[\]\n]*\])?|[&~])"
    rf"|\\(?P<symbol>{'|'.join(_SYMBOLS)})(?![A-Za-z]) ?"
    r"|\\item\[(?P<label>[^\[\]\n]*)\]"
    r"|\\(?:begin|end)\{[^{}]*\}(?:\[[^\[\]\n]*\])?(?:\{[^{}\n]*\})?"
    r"|\\(?:label|(?:eq|page)?ref|cite[a-z]*|includegraphics|url|href|input)\*?(?:\[[^\[\]\n]*\])?\{[^{}]*\}"
    r"|\\[a-zA-Z]+\*?(?:\[[^\[\]\n]*\])?|\\(?P<sign>[%&#_$])|\\[,;:! ]|[{}$]"
)
_ENDLESS_NUMBER = re.compile(r"&#\d{8,}")
_KEY = re.compile(r"^\s*[A-Za-z_][\w.\-\[\]]*\s*[=:]\s*", re.ASCII)
_STRINGS = re.compile(r'^msgstr(?:\[\d\])?\s+((?:"(?:[^"\\\n]|\\.)*"\s*)+)', re.MULTILINE)
_ESCAPE = re.compile(r'\\u([0-9a-fA-F]{4})|\\([nt"])')
_SENTENCE = re.compile(
    rf"[^。！？!?；;\n]{{0,{LONGEST_CHARACTERS - 1}}}[。！？!?；;\n]|.{{1,{LONGEST_CHARACTERS}}}", re.DOTALL
)


def members_within(name: str, data: bytes, damaged: list[str], depth: int = 2) -> Iterator[tuple[str, bytes]]:
    """Yields the file, or in place of a packed one the files in it, as `archive.zip/name`.

    The names of packed files that cannot be read are added to `damaged`.
    """
    try:
        if depth and name.endswith((".zip", ".xpi")):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for each in archive.infolist():
                    if each.file_size <= MEMBER_BYTES and not each.flag_bits & 1:
                        yield from members_within(f"{name}/{each.filename}", archive.read(each), damaged, depth - 1)
        elif depth and name.endswith(".gz"):
            with gzip.open(io.BytesIO(data)) as file:
                yield from members_within(name.removesuffix(".gz"), file.read(MEMBER_BYTES), damaged, depth - 1)
        else:
            yield name, data
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error, NotImplementedError):
        # zipfile raises NotImplementedError for an archive that is sound, but packed in a way that it cannot unpack.
        damaged.append(name)


def passages(name: str, data: bytes, fields: Sequence[str] = (), prefix: str = "") -> Iterator[str]:
    """The Chinese passages of a file, in order; `prefix` is a pattern that is removed where a line begins."""
    begin = re.compile(f"^(?:{prefix})")
    for text in _texts(name, data, fields):
        yield from _joined(begin.sub("", line.strip()) for line in plain(text).split("\n"))


def _texts(name: str, data: bytes, fields: Sequence[str]) -> Iterator[str]:
    """The texts of a file, each on its own: objects of JSON, messages of a catalogue, otherwise the whole."""
    if name.endswith((".mo", ".gmo")):
        yield "\n".join(_messages(data))
        return
    text = decoded(data)
    if name.endswith((".json", ".jsonl", ".ipynb")):
        values = [_value(text)]
        for value in values if values[0] is not None else map(_value, text.split("\n")):
            yield from _leaves(value, frozenset(fields))
    elif name.endswith(".po"):
        quoted = (re.findall(r'"((?:[^"\\\n]|\\.)*)"', match) for match in _STRINGS.findall(text))
        yield "\n".join("".join(parts) for parts in quoted)
    else:
        yield _TEX.sub(_without_tex, text) if name.endswith(".tex") else text


def _without_tex(match: re.Match[str]) -> str:
    """Returns the part of a command that a reader sees."""
    if match["symbol"]:
        return _SYMBOLS[match["symbol"]]
    return " " if match["gap"] else match["label"] or match["sign"] or ""


def _value(text: str) -> object:
    """Parses a JSON value; None if the text is not one: a file may hold one, or one in each line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def decoded(data: bytes) -> str:
    """UTF-8, UTF-16 with its mark, else GB18030; empty for what is no text."""
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in data[:4096] and not wide:
        return ""
    for encoding in ("utf-16",) if wide else ("utf-8-sig", "gb18030"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return ""


def _leaves(value: object, fields: frozenset[str]) -> Iterator[str]:
    """The strings of each object or list, in lines; objects and lists of lists in them are texts of their own."""
    parts = (
        value.items() if isinstance(value, dict) else (("", each) for each in value) if isinstance(value, list) else ()
    )
    own, below = list[str](), list[object]()
    for key, each in parts:
        lines = [each] if isinstance(each, str) else each
        if (
            isinstance(lines, list)
            and lines
            and all(isinstance(line, str) for line in lines)
            and (key or lines[0] is each)
        ):
            if not fields or key in fields or not key:
                own += lines
        else:
            below.append(each)
    if own and (not fields or isinstance(value, dict)):
        yield "\n".join(own)
    for each in below:
        yield from _leaves(each, fields)


def _messages(data: bytes) -> Iterator[str]:
    """The translations of a compiled catalogue (gettext's .mo)."""
    try:
        order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
        count, _, table = struct.unpack_from(f"{order}3I", data, 8)
        left = len(data)
        for number in range(count):
            length, place = struct.unpack_from(f"{order}2I", data, table + 8 * number)
            left -= length
            if left < 0:  # messages overlap: it is damaged
                return
            yield from data[place : place + length].decode(errors="replace").split("\0")
    except struct.error:
        return


def plain(text: str) -> str:
    """The text without the marks of HTML, XML, Markdown, roff and files of strings."""
    text = _BLOCK.sub("\n", _seen(text.replace("\r\n", "\n").replace("\r", "\n")))
    text = without_entities(_TAG.sub("", text))
    text = _MARKS.sub("", _ROFF.sub("", _LINK.sub(lambda match: match[1] or "", text)))
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else '"' if match[2] == '"' else "\n", text)


def without_entities(text: str) -> str:
    """The text with characters in place of HTML's entities; numbers that no character has would be an error."""
    return html.unescape(_ENDLESS_NUMBER.sub("", text))


def _seen(text: str) -> str:
    """The text without the parts that no reader sees; one that does not end is kept."""
    kept, at, place, endless = list[str](), 0, 0, set[str]()
    while begin := _UNSEEN.search(text, place):
        kind, place = (begin[1] or begin[0]).lower(), begin.end()
        end = None if kind in endless else _ENDS[kind].search(text, place)
        if end is None:
            endless.add(kind)
        else:
            kept.append(text[at : begin.start()])
            at = place = end.end()
    return "\n".join([*kept, text[at:]])


def share(text: str) -> float:
    """The share of Chinese characters in what is no space."""
    return len(_CHINESE.findall(text)) / max(1, len(_SOLID.findall(text)))


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Passages of neighbouring lines that are Chinese."""
    held, size = list[str](), 0
    for line in lines:
        line = _KEY.sub("", line).strip()
        if not line or share(line) < LINE_SHARE:
            continue
        held.append(line)
        size += len(line)
        if size >= JOINED_CHARACTERS:
            yield from _cut("\n".join(held))
            held, size = [], 0
    yield from _cut("\n".join(held))


def _cut(text: str) -> Iterator[str]:
    """The Chinese ones of the text's parts: whole sentences together, of at most the longest passage."""
    part = ""
    for sentence in [*_SENTENCE.findall(text), ""]:
        if len(part) + len(sentence) > LONGEST_CHARACTERS or not sentence:
            part = part.strip()
            if len(part) >= SHORTEST_CHARACTERS and share(part) >= PASSAGE_SHARE:
                yield part
            part = ""
        part += sentence

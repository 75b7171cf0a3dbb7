"""Writes training rows with a language model: queries, tasks, triples, paraphrases, synonyms. One kind a run."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from models.curation.asking import PASSAGE_CHARACTERS, AskingStep, shortened
from models.curation.frame import Outcome, digest
from models.curation.panel import NOTHING, Reply, Request
from models.curation.rows import CURATED, Row, is_document, passages_of, query_of, read_rows
from models.errors import BadData
from models.prompts import fill, load
from models.rows import Line, read_lines

TASKS = 10
DISTANCE = 1000
"""Rows between a sentence and its negative, if the corpus has four times as many."""
TEMPERATURE = 0.7
LENGTH_CHANGE = 0.3
"""By how much a synonym's query may be longer or shorter (CARE's table 24)."""
_QUOTES = " \t\n\"'“”‘’「」`*"
_LABEL = re.compile(r"^(?:问题|查询|改写后?(?:的句子)?|question|query|sentence)\s*[:：]\s*", re.IGNORECASE)

Written = list[Row] | str
"""Rows that were made of an answer, or why there are none."""


@dataclass(frozen=True)
class Kind:
    """How one kind of row is asked for and made."""

    read: Callable[[str], Any]
    make: Callable[[Synthesize, Row, Any], Written]
    fields: Callable[[Synthesize, Row], Mapping[str, str] | str] = lambda step, row: {}
    """More fields of the prompt, or why a row cannot be asked for."""


@dataclass(frozen=True)
class Synthesize(AskingStep):
    """Documents in, rows out. `kind` is a key of KINDS; `dictionary` holds {origin, replace} lines for synonyms."""

    kind: str
    files: Sequence[Path]
    instruction: str | None = None
    """What the rows' queries are asked with; without one, a task's own, or none."""
    dictionary: Path | None = None
    count: int = TASKS
    temperature: float = TEMPERATURE
    seed: int = 0

    name = "synthesize"
    forms = ("shapes",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.kind == "synonym") != (self.dictionary is not None):
            raise BadData("--dictionary FILE belongs to --kind synonym: lines of {origin, replace}")

    @property
    def template(self) -> str:
        return self.kind

    def parameters(self) -> dict[str, Any]:
        own = {"kind": self.kind, "instruction": self.instruction, "count": self.count, "seed": self.seed}
        terms = digest(self.synonyms) if self.dictionary is not None else None
        used = {"temperature": self.temperature, "dictionary": terms, "characters": PASSAGE_CHARACTERS}
        return {**super().parameters(), **own, **used}

    @cached_property
    def sentences(self) -> list[str]:
        """The texts of all files, in order: where distant negatives come from."""
        return [text for row in read_rows(self.files) if row is not None for text in passages_of(row)]

    @cached_property
    def places(self) -> dict[str, int]:
        return {text: place for place, text in enumerate(self.sentences)}

    @cached_property
    def synonyms(self) -> list[tuple[str, str]]:
        """Terms and synonyms, the longest first, so that the most specific one is replaced."""
        assert self.dictionary is not None
        return sorted(map(_terms, read_lines(self.dictionary)), key=lambda pair: (-len(pair[0]), pair))

    def chance(self, row: Row) -> random.Random:
        return random.Random(f"{self.seed} {digest(_text(row))}")

    def requests(self, row: Row) -> list[Request]:
        fields = KINDS[self.kind].fields(self, row)
        if isinstance(fields, str):
            return []
        prompt = fill(self.prompt, text=shortened(_text(row)), **fields)
        return [Request(prompt, KINDS[self.kind].read, self.reminder, self.temperature, self.seed)]

    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        kind = KINDS[self.kind]
        if not replies:
            return Outcome(dropped=str(kind.fields(self, row)))
        made, reasons = list[Row](), list[str]()
        for reply in replies[0]:
            written = NOTHING if reply.value is None else kind.make(self, row, reply.value)
            if isinstance(written, str):
                reasons.append(written)
            else:
                own = [self._whole(row, new) for new in written if not self._is_copied(row, new)]
                reasons += ["copied from the prompt"] * (len(own) < len(written))
                made += own
        notes.update({f"answers dropped: {reason}": 1 for reason in reasons if made})
        return Outcome(made, notes=notes) if made else Outcome(dropped=reasons[0], notes=notes)

    def _is_copied(self, row: Row, new: Row) -> bool:
        """Returns whether a new row repeats a text of the request or its reminder, as small models often do."""
        (request,), own = self.requests(row), _text(row)
        asked = (request.prompt, request.reminder)
        texts = (new.get("text", ""), new.get("query", ""), *new.get("pos", ()), *new.get("neg", ()))
        copied = (text.rstrip("？?。. ") for text in texts if text and text != own)
        return any(text in prompt for text in copied for prompt in asked)

    def _whole(self, row: Row, new: Row) -> Row:
        """The new row with the fields of the old one that are not its texts."""
        own = {name: value for name, value in row.items() if name in ("source", "id", CURATED)}
        wording = {"instruction": self.instruction} if self.instruction and "query" in new else {}
        return {**own, **new, **wording}


def _terms(line: Line) -> tuple[str, str]:
    """A term and its synonym; raises BadData with the place of a line that has none."""
    try:
        pair = json.loads(line.text)
        term, other = pair["origin"], pair["replace"]
    except (ValueError, LookupError, TypeError):
        term = other = None
    if not (isinstance(term, str) and isinstance(other, str) and term and other):
        raise BadData(f"{line.where}: not a line of a dictionary: it must have origin and replace, two texts")
    return term, other


def _text(row: Row) -> str:
    return str(row["text"]) if is_document(row) else query_of(row)


def read_line(text: str) -> str | None:
    """The answer as one sentence, without a label and quotes; None if there is none, or more than one line."""
    lines = [line for line in text.strip().splitlines() if line.strip(_QUOTES)]
    line = _LABEL.sub("", lines[0].strip(_QUOTES)).strip(_QUOTES) if len(lines) == 1 else ""
    return line or None


def read_fields(text: str, *, names: Sequence[str]) -> dict[str, str] | None:
    """The first JSON object that has exactly these keys with texts; code fences and words around it are passed over."""
    for value in json_values(text, "{"):
        if isinstance(value, dict) and set(value) == set(names):
            fields = {name: field.strip() for name, field in value.items() if isinstance(field, str)}
            if len(fields) == len(names) and all(fields.values()):
                return fields
    return None


def read_list(text: str) -> list[str] | None:
    """The different texts of the first JSON array of texts."""
    for value in json_values(text, "["):
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return list(dict.fromkeys(item.strip() for item in value if item.strip())) or None
    return None


def json_values(text: str, opening: str) -> list[Any]:
    """The JSON objects ("{") or arrays ("[") among the words of an answer, in order."""
    decoder, found, place = json.JSONDecoder(strict=False), list[Any](), text.find(opening)
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
            found.append(value)
        except RecursionError:  # no answer has this many brackets
            return []
        except ValueError:
            end = place + 1
        place = text.find(opening, end)
    return found


def _distant(step: Synthesize, row: Row) -> str | None:
    """A sentence far from this one in the files: at least DISTANCE rows, or a quarter of a small corpus."""
    total, place = len(step.sentences), step.places[_text(row)]
    apart = min(DISTANCE, total // 4)
    others = total - 2 * apart + 1
    if apart < 1:
        return None
    return step.sentences[(place + apart + step.chance(row).randrange(others)) % total]


def _is_sentence(step: Synthesize, row: Row) -> dict[str, str] | str:
    return {} if is_document(row) else "a training row, not a sentence: split --by sentence --from-pairs makes them"


def _paraphrase(step: Synthesize, row: Row, line: str) -> Written:
    negative = _distant(step, row)
    if line == _text(row):
        return "a paraphrase equal to its sentence"
    if negative == _text(row):
        return "a distant sentence equal to it: dedup drops such"
    return "no distant sentence: four are needed" if negative is None else [
        {"query": _text(row), "pos": [line], "neg": [negative]}
    ]  # fmt: skip


def _found_term(step: Synthesize, row: Row) -> dict[str, str] | str:
    text = _text(row)
    pair = next(((term, other) for term, other in step.synonyms if term in text and other not in text), None)
    return {"origin": pair[0], "replace": pair[1]} if pair else "no term of the dictionary"


def _synonym(step: Synthesize, row: Row, made: Mapping[str, str]) -> Written:
    term, text = _found_term(step, row), _text(row)
    assert isinstance(term, dict)
    if term["replace"] not in made["positive"] or term["replace"] not in made["hard"]:
        return "the synonym is missing"
    if term["origin"] not in made["easy"]:
        return "the term is missing in the easy negative"
    if abs(len(made["positive"]) - len(text)) > LENGTH_CHANGE * len(text):
        return "a positive of another length"
    if len({text, *made.values()}) < 1 + len(made):
        return "two equal sentences"
    return [{"query": text, "pos": [made["positive"]], "neg": [made["hard"], made["easy"]]}]


def _shape(step: Synthesize, row: Row) -> dict[str, str]:
    chance, shapes = step.chance(row), tomllib.loads(load("shapes", step.language))
    return {"task": _text(row)} | {name: chance.choice(values) for name, values in shapes.items()}


def _triple(step: Synthesize, row: Row, made: Mapping[str, str]) -> Written:
    if len(set(made.values())) < len(made):
        return "two equal texts"
    texts = {"query": made["query"], "pos": [made["positive"]], "neg": [made["negative"]]}
    return [{**texts, "instruction": _text(row)}]


KINDS: dict[str, Kind] = {
    "query": Kind(read_line, lambda step, row, line: [{"query": line, "pos": [_text(row)]}]),
    "tasks": Kind(
        read_list,
        lambda step, row, tasks: [{"text": task} for task in tasks],
        lambda step, row: {"count": str(step.count)},
    ),
    "triple": Kind(partial(read_fields, names=("query", "positive", "negative")), _triple, _shape),
    "paraphrase": Kind(read_line, _paraphrase, _is_sentence),
    "synonym": Kind(partial(read_fields, names=("positive", "hard", "easy")), _synonym, _found_term),
}

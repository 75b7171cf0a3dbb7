"""Masks names and addresses that the rules of `anonymize` miss, as a language model finds them; best a local one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.curation.anonymize import PLACEHOLDERS, Anonymize
from models.curation.asking import PASSAGE_CHARACTERS, AskingStep
from models.curation.frame import Outcome
from models.curation.match import are, read_value
from models.curation.panel import NOTHING, Reply, Request
from models.curation.rows import Row, with_texts
from models.prompts import LANGUAGES, fill

SHORTEST = 2
"""Characters of what is masked: one alone stands in too many words."""


@dataclass(frozen=True)
class AnonymizeWithModel(AskingStep):
    """Masks by `rules`, then what any model finds in the masked texts; a row without a usable answer is dropped."""

    rules: Anonymize

    name = Anonymize.name
    version = Anonymize.version
    template = "personal"

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), **self.rules.parameters()}

    def requests(self, row: Row) -> list[Request]:
        texts, size = list[str](), PASSAGE_CHARACTERS

        def note(text: str) -> str:
            texts.append(text)
            return text

        for made in self.rules.mask_row(row).rows:
            with_texts(made, note)
        pieces = [text[first : first + size] for text in texts for first in range(0, len(text), size)]
        read = partial(read_value, key="personal", fits=are(str))
        return [Request(fill(self.prompt, text=piece), read, self.reminder) for piece in pieces]

    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        by_rules = self.rules.mask_row(row)
        notes.update(by_rules.notes)
        values = [reply.value for of_piece in replies for reply in of_piece]
        if by_rules.dropped or None in values:
            return Outcome(dropped=by_rules.dropped or NOTHING, notes=notes)
        # The longest first: a whole name before a part of it.
        found = sorted({text.strip() for value in values for text in value}, key=lambda text: (-len(text), text))
        placeholder = PLACEHOLDERS["name"][LANGUAGES.index(self.language)]

        def change(text: str) -> str:
            for words in found:
                if len(words) >= SHORTEST and words in text and words not in _OWN:
                    notes["masked by a model"] += text.count(words)
                    text = text.replace(words, placeholder)
            return text

        return Outcome([with_texts(made, change) for made in by_rules.rows], notes=notes, flags=by_rules.flags)


_OWN = {form for forms in PLACEHOLDERS.values() for text in forms for form in (text, text.strip("[]"))}
"""What the rules put there, which a model may repeat."""

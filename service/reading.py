"""Texts as the encoder reads them: cut where they are too long, tokenised off the event loop where they are many.

Knows nothing of what is done with them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from models.encoder.spec import Side
from models.encoder.tokenizer import TextReader, Tokens

# Longer texts are cut before they are tokenised: no language has so many characters to a token on average, and a
# megabyte of text would hold up everyone else, in the tokenizer and in the lexical index.
CHARACTERS_PER_TOKEN = 8
# Characters that the event loop tokenises itself, because a thread would take longer to be woken.
LOOP_CHARACTERS = 1000
# Anything but spaces, control characters and the invisible marks that Unicode calls formats (Cc and Cf). An expression
# reads two megabytes of them in milliseconds; a loop would hold everyone else up for a quarter of a second.
VISIBLE = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text as far as the encoder reads it; without tokens where only its words matter."""

    text: str
    tokens: Tokens | None
    truncated: bool


def cut(text: str, encoder: TextReader) -> ReadText:
    """For the lexical index, which reads words and no tokens."""
    short = text[: encoder.spec.max_length * CHARACTERS_PER_TOKEN]
    return ReadText(short, None, len(short) < len(text))


async def read(texts: Sequence[str], encoder: TextReader, side: Side) -> list[ReadText]:
    """For the encoder, one per text, in order."""
    short = [cut(text, encoder) for text in texts]
    words = [text.text for text in short]
    if sum(map(len, words)) <= LOOP_CHARACTERS:
        tokens = encoder.tokenize(words, side)
    else:
        tokens = await asyncio.to_thread(encoder.tokenize, words, side)
    return [
        ReadText(text.text, token, text.truncated or token.truncated) for text, token in zip(short, tokens, strict=True)
    ]


def is_blank(text: str) -> bool:
    """Whether there is nothing to see in a text: spaces, control characters and invisible marks at most."""
    return VISIBLE.search(text) is None

"""Texts as the encoder reads them: tokens, truncation, blank texts."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest

from indexer.store.documents import is_blank
from models.encoder.spec import Side
from models.encoder.tokenizer import TextReader
from service.search.portions import CHARACTERS_PER_TOKEN, LOOP_CHARACTERS, cut, tokenise

pytestmark = pytest.mark.anyio

ENCODER = Path("models/pretrained/care-small-zh")


@pytest.fixture(scope="module")
def encoder() -> TextReader:
    return TextReader.open(ENCODER)


async def test_each_text_gets_its_own_tokens_in_order_on_and_off_the_loop(encoder: TextReader) -> None:
    few = ["高血压", "asthma"]
    many = [*few, "头痛" * LOOP_CHARACTERS]
    for texts in (few, many):
        found = await tokenise(texts, encoder, Side.QUERY)
        assert [text.text for text in found[:2]] == few
        assert [text.tokens for text in found] == encoder.tokenize([text.text for text in found], Side.QUERY)
        assert [text.truncated for text in found] == [False, False, True][: len(texts)]


def test_a_text_for_lexical_search_is_truncated_without_tokens(encoder: TextReader) -> None:
    limit = encoder.spec.max_length * CHARACTERS_PER_TOKEN
    assert (cut("好" * limit, encoder).truncated, cut("好" * (limit + 1), encoder).truncated) == (False, True)
    assert cut("好" * (limit + 1), encoder).text == "好" * limit
    assert cut("好", encoder).tokens is None


@pytest.mark.parametrize(("text", "blank"), [("", True), (" \t\n\u3000", True), ("\u200b\x00", True), (" a", False)])
def test_a_text_without_visible_characters_is_blank(text: str, blank: bool) -> None:
    assert is_blank(text) == blank


def test_unicode_control_and_format_characters_are_blank() -> None:
    points = map(chr, range(sys.maxunicode + 1))
    invisible = [point for point in points if point.isspace() or unicodedata.category(point) in ("Cc", "Cf")]
    assert [f"U+{ord(point):04X}" for point in invisible if not is_blank(point)] == []
    assert not is_blank("".join(invisible) + "a")

"""The search page's texts about a collection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indexer.store.documents import HEADLINE_CHARACTERS, StoredDocument
from service.http.admin import PAGE_FILE, read_page

EXAMPLE = Path("examples") / PAGE_FILE


def test_the_example_corpus_has_page_texts() -> None:
    page = read_page(EXAMPLE.parent)
    assert set(page) == {"zh", "en"}
    assert all(words.title and words.questions and words.disclaimer for words in page.values())
    rows = [json.loads(line)["metadata"] for line in Path("examples/corpus.jsonl").read_text("utf-8").splitlines()]
    for words in page.values():
        assert set(words.fields) == set().union(*rows)
        for field, values in words.values.items():
            assert set(values) == {row[field] for row in rows}


def test_a_collection_without_the_page_file_has_no_page_texts(tmp_path: Path) -> None:
    assert read_page(tmp_path) == {}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"zh": {"titel": "x"}}', "did you mean title?"),
        ('{"zh": {"questions": "x"}}', "questions: Input should be a valid array"),
        ('{"zh": {"title": "x"}', "Invalid JSON"),
        ("", "Invalid JSON"),
    ],
)
def test_an_invalid_page_file_is_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, message: str
) -> None:
    (tmp_path / PAGE_FILE).write_text(written, encoding="utf-8")
    assert read_page(tmp_path) == {}
    assert message in caplog.text
    assert PAGE_FILE in caplog.text


@pytest.mark.parametrize(
    ("title", "text", "headline"),
    [
        ("标题", "正文", "标题"),
        (" ", "一行\n又一行", "一行 又一行"),
        ("", "word " * 100, "word " * 11 + "word…"),
        ("", "字" * 100, "字" * HEADLINE_CHARACTERS + "…"),
        ("t" * 200, "正文", "t" * 200),
    ],
)
def test_a_headline_is_the_title_or_the_beginning_of_the_text(title: str, text: str, headline: str) -> None:
    assert StoredDocument.of("1", title, text, {}).headline == headline

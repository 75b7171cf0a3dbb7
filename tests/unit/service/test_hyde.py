"""Requests to a language model for hypothetical documents: the prompt, the parsing of answers, and failures."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from models.prompts import BLIND, load
from service.limits import FAILURES_TO_OPEN
from service.search.hyde import MAX_ANSWER_BYTES, Hyde
from service.settings import Settings
from tests.support.language_model import LanguageModel, choice, language_model

pytestmark = pytest.mark.anyio

LONG_SECONDS = 60.0


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    with language_model() as model:
        yield model


@pytest.fixture
async def hyde(model: LanguageModel) -> AsyncIterator[Hyde]:
    settings = Settings(hyde_url=model.url, hyde_model="tiny", hyde_key="s3cret", hyde_timeout_ms=20_000)  # type: ignore[arg-type]
    hyde = Hyde(settings)
    yield hyde
    await hyde.close()


async def test_the_requested_number_of_documents_is_returned(hyde: Hyde, model: LanguageModel) -> None:
    model.respond = lambda number: (200, choice(f"文 {number}"))
    documents = await hyde.imagine("高血压吃什么药", 3, LONG_SECONDS)
    assert sorted(documents) == ["文 0", "文 1", "文 2"]
    for request in model.requests:
        assert request["path"] == "/v1/chat/completions"
        assert request["authorization"] == "Bearer s3cret"
        assert request["model"] == "tiny"
        assert request["max_tokens"] == 256
        assert request["temperature"] > 0


@pytest.mark.parametrize(("query", "language"), [("高血压吃什么药", "zh"), ("what lowers blood pressure", "en")])
async def test_the_prompt_is_the_blind_template_in_the_querys_language(
    hyde: Hyde, model: LanguageModel, query: str, language: str
) -> None:
    await hyde.imagine(query, 1, LONG_SECONDS)
    (message,) = model.requests[0]["messages"]
    assert message == {"role": "user", "content": load(BLIND, language).replace("{query}", query)}


async def test_the_reasoning_of_a_model_is_left_out(hyde: Hyde, model: LanguageModel) -> None:
    model.respond = lambda number: (200, choice("<think>什么药？</think>\n\n氨氯地平。 "))
    assert await hyde.imagine("高血压", 1, LONG_SECONDS) == ["氨氯地平。"]


@pytest.mark.parametrize(
    "answer",
    [
        (500, b""),
        (404, choice("not here")),
        (200, b"not json"),
        (200, b"[]"),
        (200, b'{"choices": []}'),
        (200, b'{"choices": [{"message": null}]}'),
        (200, choice(None)),
        (200, choice(["parts"])),
        (200, choice("  \u200b\x00")),
        (200, choice("x" * MAX_ANSWER_BYTES)),
    ],
    ids=["500", "404", "no json", "a list", "no choice", "no message", "null", "no text", "blank", "too long"],
)
async def test_an_unusable_answer_gives_no_document(
    hyde: Hyde, model: LanguageModel, answer: tuple[int, bytes]
) -> None:
    model.respond = lambda number: answer
    assert await hyde.imagine("高血压", 2, LONG_SECONDS) == []


async def test_documents_are_returned_even_if_some_requests_fail(hyde: Hyde, model: LanguageModel) -> None:
    model.respond = lambda number: (200, choice("药")) if number == 1 else (500, b"")
    assert await hyde.imagine("高血压", 3, LONG_SECONDS) == ["药"]


async def test_a_slow_model_is_not_waited_for(hyde: Hyde, model: LanguageModel) -> None:
    model.awake.clear()
    assert await hyde.imagine("高血压", 2, 0.2) == []


async def test_requests_with_a_short_timeout_do_not_open_the_breaker(hyde: Hyde, model: LanguageModel) -> None:
    model.awake.clear()
    for _ in range(FAILURES_TO_OPEN):
        assert await hyde.imagine("高血压", 1, 0.05) == []
    model.awake.set()
    assert len(await hyde.imagine("高血压", 1, LONG_SECONDS)) == 1


async def test_an_unreachable_model_gives_no_document() -> None:
    hyde = Hyde(Settings(hyde_url="http://127.0.0.1:9/v1", hyde_model="tiny"))
    assert await hyde.imagine("高血压", 2, LONG_SECONDS) == []
    await hyde.close()


async def test_a_model_that_keeps_failing_is_not_asked(hyde: Hyde, model: LanguageModel) -> None:
    model.respond = lambda number: (500, b"")
    for _ in range(FAILURES_TO_OPEN + 2):
        assert await hyde.imagine("高血压", 1, LONG_SECONDS) == []
    assert len(model.requests) == FAILURES_TO_OPEN


async def test_nothing_of_a_query_is_logged(hyde: Hyde, model: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await hyde.imagine("很私密的问题", 1, LONG_SECONDS)
    model.respond = lambda number: (500, "很私密的问题".encode())
    for _ in range(FAILURES_TO_OPEN):
        await hyde.imagine("很私密的问题", 1, LONG_SECONDS)
    written = [record.getMessage() for record in caplog.records]
    assert "the language model of HyDE gave no document: 500" in written
    assert not any("私密" in line or "\\u79c1" in line or "s3cret" in line for line in written)

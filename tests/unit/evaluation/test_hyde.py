import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.encoder.spec import Side
from models.endpoint import Endpoint
from models.errors import CareError
from models.evaluation.cache import VectorCache
from models.evaluation.readers import EncoderReader
from models.evaluation.remote import Generator, HydeReader
from models.evaluation.systems import Dense, NotApplicable
from models.prompts import BLIND, fill, load
from tests.support.evaluation import PETS, RETRIEVAL, STS, VECTORS, TableEncoder
from tests.support.http_thread import QuietHandler, serving_http
from tests.support.json_server import Body, JsonServer, Reply, json_server


def write_a_document(path: str, body: Body) -> Reply:
    """Answers the first request for a prompt with 猫 and the second with 狗, by its seed."""
    assert body is not None
    content = ["猫", "狗"][body["seed"]]
    return 200, {"choices": [{"message": {"role": "assistant", "content": f" {content}\n"}}]}


@pytest.fixture
def model() -> Iterator[JsonServer]:
    with json_server(write_a_document) as server:
        yield server


@pytest.fixture
def endpoint(model: JsonServer) -> Iterator[Endpoint]:
    endpoint = Endpoint(f"{model.url}/v1", pause=lambda seconds: None)
    yield endpoint
    endpoint.close()


def hyde_of(endpoint: Endpoint, folder: Path, documents: int, encoder: TableEncoder | None = None) -> HydeReader:
    reader = EncoderReader((encoder or TableEncoder()).opened(), VectorCache(folder / "vectors", 2))
    return HydeReader(reader, Generator(endpoint, "qwen", documents, folder / "hyde"))


def unit(*vectors: tuple[float, float]) -> list[float]:
    mean = np.mean(vectors, axis=0)
    return (mean / np.linalg.norm(mean)).tolist()


def test_a_query_becomes_the_mean_of_itself_and_its_documents(endpoint: Endpoint, tmp_path: Path) -> None:
    one = hyde_of(endpoint, tmp_path, 1).read(["小狗"], Side.QUERY, RETRIEVAL)
    assert one.tolist() == [pytest.approx(unit(VECTORS["小狗"], VECTORS["猫"]))]
    two = hyde_of(endpoint, tmp_path, 2).read(["小狗", "狗"], Side.QUERY, RETRIEVAL)
    assert two.tolist() == [
        pytest.approx(unit(VECTORS["小狗"], VECTORS["猫"], VECTORS["狗"])),
        pytest.approx(unit(VECTORS["狗"], VECTORS["猫"], VECTORS["狗"])),
    ]


def test_a_query_may_be_replaced_by_its_documents_or_joined_with_them(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SL-HyDE's table 5: w/ D and w/ con."""
    two = hyde_of(endpoint, tmp_path, 2)
    alone = replace(two, fusing="document").read(["小狗"], Side.QUERY, RETRIEVAL)
    assert alone.tolist() == [pytest.approx(unit(VECTORS["猫"], VECTORS["狗"]))]
    monkeypatch.setitem(VECTORS, "小狗\n猫\n狗", (0.0, 1.0))
    encoder = TableEncoder()
    joined = replace(hyde_of(endpoint, tmp_path, 2, encoder), fusing="joined")
    (vector,) = joined.read(["小狗"], Side.QUERY, replace(RETRIEVAL, query_instruction="query:")).tolist()
    assert vector == [0, 1]
    assert encoder.asked == ["query:\nQuery: 小狗\n猫\n狗"]
    names = [replace(two, fusing=each).facts.name for each in ("mean", "document", "joined")]
    assert len(set(names)) == 3


def test_each_seed_has_its_own_documents(endpoint: Endpoint, tmp_path: Path, model: JsonServer) -> None:
    first = hyde_of(endpoint, tmp_path, 1)
    second = replace(first, generator=replace(first.generator, seed=1))
    assert second.read(["小狗"], Side.QUERY, RETRIEVAL).tolist() == [
        pytest.approx(unit(VECTORS["小狗"], VECTORS["狗"]))
    ]
    assert [body["seed"] for _, body, _ in model.requests if body] == [1]


def test_the_given_number_of_requests_is_sent_at_once(tmp_path: Path) -> None:
    """Every request waits until four have arrived: fewer at once would time out."""
    together = threading.Barrier(4, timeout=20)

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            self.body()
            together.wait()
            self.answer(200, b'{"choices": [{"message": {"content": "d"}}]}')

    with serving_http(Handler) as port:
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", attempts=1)
        generator = Generator(endpoint, "qwen", 1, None, at_once=4)
        assert generator.write(["a", "b", "c", "d"], None) == [["d"] * 4]
        endpoint.close()


def test_documents_are_read_without_the_model(endpoint: Endpoint, tmp_path: Path, model: JsonServer) -> None:
    assert hyde_of(endpoint, tmp_path, 1).read(["狗"], Side.DOCUMENT, RETRIEVAL).tolist() == [[0, 1]]
    assert model.requests == []


def test_hypothetical_documents_are_read_as_documents(endpoint: Endpoint, tmp_path: Path) -> None:
    encoder = TableEncoder()
    task = replace(RETRIEVAL, query_instruction="query:", document_instruction="document:")
    hyde_of(endpoint, tmp_path, 1, encoder).read(["小狗"], Side.QUERY, task)
    assert encoder.asked == ["query:\nQuery: 小狗", "document:猫"]


def test_the_prompt_is_in_the_querys_language_or_that_of_the_task(
    endpoint: Endpoint, tmp_path: Path, model: JsonServer
) -> None:
    generator = hyde_of(endpoint, tmp_path, 1).generator
    generator.write(["感冒", "influenza"], None)
    generator.write(["感冒"], "写一段：{query}")
    asked = {body["messages"][0]["content"] for _, body, _ in model.requests if body is not None}
    assert asked == {fill(load(BLIND, "zh"), query="感冒"), fill(load(BLIND, "en"), query="influenza"), "写一段：感冒"}
    assert {(path, body["model"]) for path, body, _ in model.requests if body} == {("/v1/chat/completions", "qwen")}


def test_hypothetical_documents_are_cached(endpoint: Endpoint, tmp_path: Path, model: JsonServer) -> None:
    for documents, requests in ((1, 2), (1, 2), (2, 4)):
        hyde_of(endpoint, tmp_path, documents).read(["小猫", "小狗"], Side.QUERY, RETRIEVAL)
        assert len(model.requests) == requests
    hyde_of(endpoint, tmp_path, 1).read(["小猫"], Side.QUERY, RETRIEVAL, cached=False)
    assert len(model.requests) == 5


def test_an_unreadable_cached_document_is_generated_again(
    endpoint: Endpoint, tmp_path: Path, model: JsonServer
) -> None:
    whole = hyde_of(endpoint, tmp_path, 1).read(["小猫"], Side.QUERY, RETRIEVAL)
    (kept,) = tmp_path.rglob("*.json")
    content = kept.read_bytes()
    for damaged in (b"", content[:-5], b"[]", b"{}"):
        kept.write_bytes(damaged)
        np.testing.assert_array_equal(hyde_of(endpoint, tmp_path, 1).read(["小猫"], Side.QUERY, RETRIEVAL), whole)
        assert kept.read_bytes() == content
    assert len(model.requests) == 5


def test_a_search_uses_hypothetical_documents(endpoint: Endpoint, tmp_path: Path) -> None:
    answers = Dense(hyde_of(endpoint, tmp_path, 1)).answer(RETRIEVAL)
    assert isinstance(answers, list)
    assert [rows.tolist() for rows, _ in answers] == [[0, 1], [0, 1]]
    assert Dense(hyde_of(endpoint, tmp_path, 1)).online(RETRIEVAL, PETS)("小狗")[0].tolist() == [0, 1]


def test_sentence_pairs_are_refused(endpoint: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(NotApplicable, match="HyDE"):
        Dense(hyde_of(endpoint, tmp_path, 1)).answer(STS)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "not a chat completion"),
        ({"error": "no such model"}, "not a chat completion"),
        ({"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]}, "not a chat completion"),
        ({"choices": [{"message": {"content": None}}]}, "qwen wrote nothing"),
    ],
)
def test_an_unusable_answer_of_the_model_is_an_error(tmp_path: Path, answer: object, message: str) -> None:
    with json_server(lambda path, body: (200, answer)) as server:
        endpoint = Endpoint(server.url)
        with pytest.raises(CareError, match=message):
            hyde_of(endpoint, tmp_path, 1).read(["猫"], Side.QUERY, RETRIEVAL)
        endpoint.close()
    assert not list(tmp_path.glob("hyde/*"))

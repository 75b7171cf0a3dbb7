"""An encoder behind an address: the requests, the use of the answers, and when a server is refused."""

from __future__ import annotations

import base64
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cli import main
from models.encoder import address
from models.encoder.address import AddressEncoder, AddressReader, load_encoder
from models.encoder.spec import CANARIES_FILE, EncoderSpec, Side
from models.encoder.tokenizer import Tokenizer
from models.endpoint import retry_after
from models.errors import BadEncoder, EncoderAway, EncoderMoved
from models.evaluation.encoders import open_encoder
from models.importing.address import Server, import_address
from models.importing.pairs import compare
from tests.support.embeddings_server import DIM, EmbeddingsServer, answer_to, embeddings_server, vector_of

BUNDLED = Path("models/pretrained/care-small-zh")
TEXTS = [f"第{number}种药的用法" + "，每日一次" * (number % 7) for number in range(100)]
NO_HEADERS: dict[str, str] = {}


@pytest.fixture
def server() -> Iterator[EmbeddingsServer]:
    with embeddings_server() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pauses last milliseconds."""
    monkeypatch.setattr(address, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(address, "LONGEST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def folder(server: EmbeddingsServer, tmp_path: Path) -> Path:
    import_address(Server(server.url, "toy/embed"), tmp_path / "encoder")
    server.bodies.clear()
    return tmp_path / "encoder"


@pytest.fixture
def encoder(folder: Path, server: EmbeddingsServer) -> AddressEncoder:
    encoder = AddressEncoder.load(folder)
    server.bodies.clear()
    return encoder


def expected(texts: list[str]) -> np.ndarray:
    vectors = np.array([vector_of(text) for text in texts])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_an_import_stores_the_description_of_the_server_but_not_the_key(
    server: EmbeddingsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_KEY", "sk-secret")
    own = ["--model", "toy/embed", "--api-key-env", "TOY_KEY", "--dim", "8", "--query-instruction", "问："]
    assert main(["encoder", "import", f"{server.url}/", str(tmp_path / "out"), *own]) == 0
    assert set(server.keys) == {"Bearer sk-secret"}
    spec = EncoderSpec.load(tmp_path / "out")
    assert spec.address is not None
    assert (spec.address.url, spec.address.model, spec.address.key_variable) == (server.url, "toy/embed", "TOY_KEY")
    assert (spec.space, spec.native_dim, spec.dim, spec.query_instruction) == ("embed", DIM, 8, "问：")
    kept = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    output = capsys.readouterr()
    assert "sk-secret" not in kept + output.out + output.err
    assert "with the key in TOY_KEY" in output.out
    monkeypatch.delenv("TOY_KEY")
    with pytest.raises(BadEncoder, match="set the environment variable TOY_KEY"):
        AddressEncoder.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["ftp://host/v1", "out", "--model", "m"], "is not an address"),
        (["http://me:secret@host/v1", "out", "--model", "m"], "must hold neither a key nor a query"),
        (["http://127.0.0.1:1/v1", "out"], "name the encoder with --model"),
        (["http://127.0.0.1:1/v1", "out", "--model", "m", "--pooling", "cls"], "a server pools by itself"),
        (["http://127.0.0.1:1/v1", "out", "--model", "m", "--query-fields", "[]"], "'[]' is not a JSON object"),
        (["http://127.0.0.1:1/v1", "out", "--model", "m", "--query-fields", '{"a": NaN}'], "is not a JSON object"),
        (
            ["http://127.0.0.1:1/v1", "out", "--model", "m", "--query-fields", '{"input": "x"}'],
            "input is part of every",
        ),
        (["some-folder", "out", "--model", "m"], "--model is for a server"),
    ],
)
def test_an_impossible_import_is_refused_with_the_reason(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        assert main(["encoder", "import", *given]) == 1
    assert message in capsys.readouterr().err


def test_show_describes_the_encoder_and_whether_the_server_answers(
    folder: Path, server: EmbeddingsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["encoder", "show", str(folder)]) == 0
    assert f"run by {server.url} as toy/embed, without a key" in (output := capsys.readouterr().out)
    assert "the server answers; the canaries have a cosine of 1.000000 or more" in output
    server.salt = "another model"
    assert main(["encoder", "show", str(folder)]) == 1
    assert "gives other vectors than when its encoder folder was written" in capsys.readouterr().err


def test_texts_are_sent_in_concurrent_batches_and_unit_vectors_come_in_order(
    encoder: AddressEncoder, server: EmbeddingsServer
) -> None:
    vectors = encoder.encode(TEXTS, Side.DOCUMENT)
    np.testing.assert_allclose(vectors, expected(TEXTS), atol=1e-6)
    sizes = [len(body["input"]) for body in server.bodies]
    assert sorted(sizes) == [1, 4, 32, 32, 32]  # the last is a canary
    assert 1 <= server.most_at_once <= address.REQUESTS_AT_ONCE
    assert {body["model"] for body in server.bodies} == {"toy/embed"}


def test_instructions_and_fields_reach_the_server(server: EmbeddingsServer, tmp_path: Path) -> None:
    fields: dict[str, dict[str, Any]] = {
        "query_fields": {"input_type": "query"},
        "document_fields": {"input_type": "document"},
    }
    given = Server(server.url, "m", query_instruction="问：", document_instruction="文：", **fields)
    import_address(given, tmp_path / "out")
    encoder = load_encoder(tmp_path / "out")
    server.bodies.clear()
    encoder.encode(["痛"], Side.QUERY)
    encoder.encode(["痛"], Side.DOCUMENT)
    assert [(body["input"], body["input_type"]) for body in server.bodies] == [
        (["问：痛"], "query"),
        (["文：痛"], "document"),
    ]
    with pytest.raises(BadEncoder, match="which an evaluation cannot"):
        open_encoder(str(tmp_path / "out"))


def test_an_evaluation_sends_texts_without_an_instruction(server: EmbeddingsServer, tmp_path: Path) -> None:
    import_address(Server(server.url, "m", query_instruction="问："), tmp_path / "out")
    opened = open_encoder(str(tmp_path / "out"))
    np.testing.assert_allclose(opened.encode(["痛", "药"]), expected(["痛", "药"]), atol=1e-6)
    assert opened.spec.query_instruction == "问："


@pytest.mark.parametrize("exact", [True, False])
def test_texts_are_truncated_to_the_encoders_length(server: EmbeddingsServer, tmp_path: Path, exact: bool) -> None:
    tokenizer = BUNDLED / "tokenizer.json" if exact else None
    import_address(Server(server.url, "m", max_length=12, tokenizer=tokenizer), tmp_path / "out")
    encoder = AddressEncoder.load(tmp_path / "out")
    server.bodies.clear()
    text = "高血压患者应当每日测量血压并且记录"
    encoder.encode([text, "短"], Side.DOCUMENT)
    assert sorted(server.texts, key=len) == ["短", text[: 10 if exact else 12]]


def test_the_token_estimate_is_near_that_of_a_real_tokenizer() -> None:
    real = Tokenizer.load(BUNDLED / "tokenizer.json", 4096)
    estimate = Tokenizer.estimated(4096)
    lines = Path("examples/corpus.jsonl").read_text(encoding="utf-8").splitlines()
    ratios = [len(real.offsets(text)) / len(estimate(text)) for text in (json.loads(line)["text"] for line in lines)]
    assert min(ratios) > 0.9
    assert max(ratios) < 1.15


def test_all_calls_share_one_set_of_certificate_authorities(
    encoder: AddressEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    class Client(httpx.Client):
        def __init__(self, **options: Any) -> None:  # noqa: ANN401 - the options of httpx
            given.append(options.get("verify"))
            super().__init__(**options)

    monkeypatch.setattr(address.httpx, "Client", Client)
    for text in TEXTS[:2]:
        encoder.encode([text], Side.QUERY)
    assert len(given) == 2
    assert isinstance(given[0], ssl.SSLContext)
    assert given[1] is given[0]


@pytest.mark.parametrize(
    "failure",
    [
        (429, {"error": "slow down"}, {"Retry-After": "0.01"}),
        (429, {"error": "slow down"}, NO_HEADERS),
        (500, b"<html>", NO_HEADERS),
        (503, {}, {"Retry-After": "nonsense"}),
    ],
)
def test_a_temporary_failure_is_retried(
    encoder: AddressEncoder, server: EmbeddingsServer, failure: tuple[int, Any, dict[str, str]]
) -> None:
    server.once(failure, failure, failure)
    np.testing.assert_allclose(encoder.encode(TEXTS[:40], Side.DOCUMENT), expected(TEXTS[:40]), atol=1e-6)
    assert len(server.bodies) == 3 + 3


def test_retry_after_delays_every_request(encoder: AddressEncoder, server: EmbeddingsServer) -> None:
    server.once((429, {}, {"Retry-After": "0.3"}))
    began = time.monotonic()
    encoder.encode(["痛"], Side.QUERY)
    assert time.monotonic() - began >= 0.3


def test_a_too_long_retry_after_is_an_error(encoder: AddressEncoder, server: EmbeddingsServer) -> None:
    server.once((429, {}, {"Retry-After": "86400"}))
    with pytest.raises(EncoderAway, match="answers 429") as failed:
        encoder.encode(["痛"], Side.QUERY)
    assert "what is encoded is kept" in str(failed.value)


def test_retry_after_is_seconds_or_a_date() -> None:
    soon = datetime.now(UTC) + timedelta(minutes=40)
    assert 2300 < retry_after(format_datetime(soon, usegmt=True)) <= 2400
    assert [retry_after(text) for text in ("7", "-3", "nan", "", "soon")] == [7, 0, 0, 0, 0]
    assert retry_after(format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)) == 0


def test_retries_end_with_an_error(
    encoder: AddressEncoder, server: EmbeddingsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "PATIENCE_SECONDS", 0.05)
    server.override = lambda body: (500, {}, NO_HEADERS)
    with pytest.raises(EncoderAway, match=r"answers 500.*run the same command again"):
        encoder.encode(TEXTS, Side.DOCUMENT)


def test_an_unreachable_server_is_reported_as_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "OPENING_SECONDS", 0.05)
    spec = EncoderSpec.load(folder)
    assert spec.address is not None
    nobody = spec.address.model_copy(update={"url": "http://127.0.0.1:1/v1"})
    spec.model_copy(update={"address": nobody}).save(folder)
    with pytest.raises(EncoderAway, match=r"does not answer \(ConnectError\)"):
        AddressEncoder.load(folder)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_too_large_batch_is_halved_and_the_size_is_remembered(
    encoder: AddressEncoder, server: EmbeddingsServer, status: int
) -> None:
    server.override = lambda body: (
        (status, {"error": "batch too large"}, NO_HEADERS) if len(body["input"]) > 8 else None
    )
    np.testing.assert_allclose(encoder.encode(TEXTS, Side.DOCUMENT), expected(TEXTS), atol=1e-6)
    server.bodies.clear()
    encoder.encode(TEXTS, Side.DOCUMENT)
    assert max(len(body["input"]) for body in server.bodies) == 8


def test_a_single_text_that_the_server_refuses_is_an_error(encoder: AddressEncoder, server: EmbeddingsServer) -> None:
    server.override = lambda body: (400, {"error": "too long"}, NO_HEADERS) if TEXTS[3] in body["input"] else None
    with pytest.raises(BadEncoder, match=r"answers 400: .*too long.*--max-length"):
        encoder.encode(TEXTS[:8], Side.DOCUMENT)


def test_a_batch_without_an_answer_in_time_is_halved(
    encoder: AddressEncoder, server: EmbeddingsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = httpx.Client.post

    def time_out(client: httpx.Client, url: str, *, json: dict[str, Any]) -> httpx.Response:
        if len(json["input"]) > 2:
            raise httpx.ReadTimeout("timed out")
        return post(client, url, json=json)

    monkeypatch.setattr(httpx.Client, "post", time_out)
    np.testing.assert_allclose(encoder.encode(TEXTS[:4], Side.DOCUMENT), expected(TEXTS[:4]), atol=1e-6)
    assert [len(body["input"]) for body in server.bodies] == [2, 2]


def altered(change: str) -> Any:  # noqa: ANN401
    def answer(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        content = answer_to(body)
        entries = content["data"]
        match change:
            case "too few":
                entries.pop()
            case "twice":
                entries[0]["index"] = 1
            case "wider":
                for entry in entries:
                    entry["embedding"].append(1.0)
            case "ragged":
                entries[0]["embedding"].pop()
            case "nan":
                entries[0]["embedding"][3] = float("nan")
            case "null":
                entries[0]["embedding"][3] = None
            case "zero":
                entries[0]["embedding"] = [0.0] * DIM
            case "unnumbered":
                entries[0]["index"] = [0]
            case "deep":
                return 200, b"[" * 100_000, NO_HEADERS
            case "other":
                content = {"results": []}
            case "html":
                return 200, b"<html></html>", NO_HEADERS
        return 200, content, NO_HEADERS

    return answer


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("too few", BadEncoder, "gave 2 vectors for 3 texts"),
        ("twice", BadEncoder, "misnumbered"),
        ("wider", EncoderMoved, "gives 17 dimensions instead of 16"),
        ("ragged", EncoderMoved, "gives 15 and 16 dimensions instead of 16"),
        ("nan", BadEncoder, "zero or not finite"),
        ("null", BadEncoder, "zero or not finite"),
        ("zero", BadEncoder, "zero or not finite"),
        ("unnumbered", BadEncoder, "does not answer with OpenAI's embeddings"),
        ("deep", BadEncoder, "does not answer with OpenAI's embeddings"),
        ("other", BadEncoder, "does not answer with OpenAI's embeddings"),
        ("html", BadEncoder, "does not answer with OpenAI's embeddings"),
    ],
)
def test_unusable_answers_are_refused(
    encoder: AddressEncoder, server: EmbeddingsServer, change: str, error: type[Exception], message: str
) -> None:
    server.override = altered(change)
    with pytest.raises(error, match=message):
        encoder.encode(TEXTS[:3], Side.QUERY)


def test_vectors_out_of_order_and_in_base64_are_read(encoder: AddressEncoder, server: EmbeddingsServer) -> None:
    def shuffled(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        content = answer_to(body)
        for entry in content["data"]:
            packed = np.array(entry["embedding"], "<f4").tobytes()
            entry["embedding"] = base64.b64encode(packed).decode()
        content["data"].reverse()
        return 200, content, NO_HEADERS

    def unnumbered(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        content = answer_to(body)
        return 200, content | {"data": [entry | {"index": None} for entry in content["data"]]}, NO_HEADERS

    for override in (shuffled, unnumbered):
        server.override = override
        np.testing.assert_allclose(encoder.encode(TEXTS[:5], Side.QUERY), expected(TEXTS[:5]), atol=1e-6)


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "without a valid key; import it with --api-key-env"), (404, "check the address and the name of the model")],
)
def test_a_permanent_error_is_not_retried(
    encoder: AddressEncoder, server: EmbeddingsServer, status: int, message: str
) -> None:
    server.override = lambda body: (status, {"error": "no"}, NO_HEADERS)
    with pytest.raises(BadEncoder, match=message):
        encoder.encode(["痛"], Side.QUERY)
    assert len(server.bodies) == 1


def test_a_server_whose_canary_vectors_changed_is_refused_with_the_remedy(
    folder: Path, server: EmbeddingsServer
) -> None:
    server.salt = "another model"
    with pytest.raises(EncoderMoved, match=r"toy/embed at .*have it run the same model again, or import"):
        AddressEncoder.load(folder)


def test_a_server_that_changes_in_the_middle_of_a_shard_is_refused(
    encoder: AddressEncoder, server: EmbeddingsServer
) -> None:
    server.salt = "another model"
    with pytest.raises(EncoderMoved):
        encoder.encode(TEXTS, Side.DOCUMENT)


def test_small_noise_in_canary_vectors_is_accepted(folder: Path, server: EmbeddingsServer) -> None:
    noise = np.random.default_rng(0)

    def noisy(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        content = answer_to(body)
        for entry in content["data"]:
            values = np.array(entry["embedding"])
            entry["embedding"] = (values + noise.normal(size=DIM) * np.linalg.norm(values) * 0.005).tolist()
        return 200, content, NO_HEADERS

    server.override = noisy
    assert 0.99 < AddressEncoder.load(folder).check() < 1


def test_a_repeated_import_keeps_canaries_and_fingerprint_if_the_model_is_the_same(
    folder: Path, server: EmbeddingsServer
) -> None:
    before = AddressReader.open(folder)
    kept = (folder / CANARIES_FILE).read_bytes()
    with embeddings_server() as elsewhere:
        import_address(Server(elsewhere.url, "toy/embed", key_variable=None), folder)
        after = AddressReader.open(folder)
        assert after.address.url == elsewhere.url != before.address.url
        elsewhere.salt = "another model"
        with pytest.raises(EncoderMoved):
            import_address(Server(elsewhere.url, "toy/embed"), folder)
    assert (after.fingerprint, (folder / CANARIES_FILE).read_bytes()) == (before.fingerprint, kept)
    with pytest.raises(BadEncoder, match="is another encoder"):
        import_address(Server(server.url, "other"), folder)


def test_the_fingerprint_depends_on_the_model_and_its_canaries(server: EmbeddingsServer, tmp_path: Path) -> None:
    names = {"same": "m", "again": "m", "other": "n"}
    for name, model in names.items():
        import_address(Server(server.url, model), tmp_path / name)
    server.salt = "another model"
    import_address(Server(server.url, "m"), tmp_path / "moved")
    found = {name: AddressReader.open(tmp_path / name).fingerprint for name in (*names, "moved")}
    assert found["same"] == found["again"]
    assert len(set(found.values())) == 3
    assert AddressReader.open(tmp_path / "same").spec.fingerprints == {found["same"]}


def test_two_addresses_are_compared_as_a_pair(server: EmbeddingsServer, tmp_path: Path) -> None:
    import_address(Server(server.url, "m", space="s"), tmp_path / "a")
    import_address(Server(server.url, "n", space="s"), tmp_path / "b")
    assert compare(tmp_path / "a", tmp_path / "b").shared


def test_altered_canaries_are_noticed(folder: Path) -> None:
    path = folder / CANARIES_FILE
    path.write_text(path.read_text().replace("asthma", "angina"))
    with pytest.raises(BadEncoder, match="was altered"):
        AddressReader.open(folder)

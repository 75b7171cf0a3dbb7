"""OpenAI's own client against the service on a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from tests.api.live import live
from tests.api.support import Built, make_settings


@pytest.fixture(scope="module")
def client(built: Built) -> Iterator[openai.OpenAI]:
    with (
        live(make_settings(built, threads=1, reload_seconds=0)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none is needed", max_retries=0) as client,
    ):
        yield client


def test_embeddings_come_back_as_floats(client: openai.OpenAI, encoder: OnnxEncoder) -> None:
    texts = ["高血压吃什么药", "asthma inhaler"]
    answer = client.embeddings.create(model="care-small-zh", input=texts)  # requests base64 by default
    vectors = np.array([each.embedding for each in answer.data], np.float32)
    assert vectors.shape == (2, 512)
    assert np.einsum("nd,nd->n", vectors, encoder.encode(texts, Side.QUERY)) == pytest.approx(1, abs=0.01)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    assert [each.index for each in answer.data] == [0, 1]


def test_the_options_reach_the_service(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(
        model="care-small-zh",
        input="骨折",
        dimensions=32,
        encoding_format="float",
        user="somebody",
        extra_body={"input_type": "document"},
    )
    assert len(answer.data[0].embedding) == 32
    assert np.linalg.norm(answer.data[0].embedding) == pytest.approx(1, abs=1e-5)


def test_models_can_be_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["care-small-zh"]
    assert client.models.retrieve("care-small-zh").owned_by == "care-search"


def test_errors_are_raised_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="care-small-zh"):
        client.embeddings.create(model="text-embedding-3-small", input="骨折")
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions") as refused:
        client.embeddings.create(model="care-small-zh", input="骨折", dimensions=4096)
    assert refused.value.code == "invalid_request"
    with pytest.raises(openai.UnprocessableEntityError, match="send texts"):
        client.embeddings.create(model="care-small-zh", input=[[101, 102]])

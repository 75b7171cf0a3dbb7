"""Requests generated from the OpenAPI document, valid and invalid, against the service on a real socket.

No request may cause a server error, or an answer whose status, type or shape is not documented.
The requests are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from service.http.app import create_app
from service.settings import Settings
from tests.api.live import live
from tests.api.support import AS_ADMIN, Built, copy_collection, make_settings
from tests.support.keys import bearer, create

# In addition, schemathesis tries the bounds of every field one by one.
EXAMPLES = 8


def no_failure_of_the_server(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Fails on a status of 500 or more, except 504 if the request itself allows too little time."""
    has_limit = any("timeout_ms" in values for values in (case.query, case.body) if isinstance(values, dict))
    if response.status_code != 504 or not has_limit:
        not_a_server_error(ctx, response, case)


CHECKS = (
    no_failure_of_the_server,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
)


@pytest.fixture(scope="module")
def address(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    own = copy_collection(built, tmp_path_factory.mktemp("schemathesis") / "collection")  # requests change it
    with live(make_settings(own, threads=1, reload_seconds=0)) as address:
        yield address


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One session for all requests: making one and looking for proxies takes longer than most answers."""
    with requests.Session() as session:
        session.trust_env = False
        yield session


KEYS = {
    "searcher": ("--scope", "search"),
    "writer": ("--scope", "write"),
    "keeper": ("--scope", "admin"),
    "tenant": ("--scope", "search", "--scope", "write", "--filter", "kind=drug"),
}


@pytest.fixture(scope="module")
def guarded(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the address of a service with keys of every scope, and the keys."""
    folder: Path = tmp_path_factory.mktemp("schemathesis-keys")
    own = copy_collection(built, folder / "collection")
    keys = {name: create(folder / "keys.json", name, *options) for name, options in KEYS.items()}
    with live(make_settings(own, threads=1, reload_seconds=0, keys_file=folder / "keys.json")) as address:
        yield address, keys


schema = schemathesis.openapi.from_dict(create_app(Settings()).openapi())


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_documented(case: schemathesis.Case, address: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=address, session=session, checks=CHECKS, headers=AS_ADMIN)


def test_an_existing_document_is_answered_as_documented(address: str) -> None:
    case = schema["/v1/documents/{id}"]["GET"].Case(path_parameters={"id": "a-6"})
    assert case.call_and_validate(base_url=address, checks=CHECKS[:-2]).status_code == 200


@pytest.mark.parametrize("name", KEYS)
@schema.parametrize()
@settings(
    max_examples=2,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_keys_of_every_scope_are_answered_as_documented(
    case: schemathesis.Case, name: str, guarded: tuple[str, dict[str, str]], session: requests.Session
) -> None:
    address, keys = guarded
    # The data of a refused request is not checked.
    case.call_and_validate(base_url=address, session=session, checks=CHECKS[:-2], headers=bearer(keys[name]))

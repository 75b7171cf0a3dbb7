"""Parsing of the setting that says where vectors are searched."""

from __future__ import annotations

import sys

import pytest

from indexer.errors import BadDatabase
from indexer.store.collection import Database


@pytest.mark.parametrize(
    ("text", "url", "alias"),
    [
        ("qdrant+http://host:6333/care", "http://host:6333", "care"),
        ("qdrant+http://host/care", "http://host:6333", "care"),
        ("qdrant+https://host/care", "https://host:443", "care"),
        ("qdrant+http://[::1]:7000/care", "http://[::1]:7000", "care"),
        ("qdrant+https://host/behind/a/proxy/care", "https://host:443/behind/a/proxy", "care"),
    ],
)
def test_an_address_has_a_server_and_an_alias(text: str, url: str, alias: str) -> None:
    assert Database.parse(text, "secret", 3) == Database(url, alias, "secret", 3)


def test_the_default_is_no_database() -> None:
    assert Database.parse("faiss") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "qdrant",
        "http://host:6333/care",
        "qdrant+http://host:6333",
        "qdrant+http://host:6333/",
        "qdrant+http:///care",
        "qdrant+http://host:port/care",
        "qdrant+http://user:password@host/care",
        "qdrant+http://host/care?exact=1",
        "milvus+http://host/care",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(BadDatabase, match="neither faiss nor like qdrant"):
        Database.parse(text)


def test_the_error_for_a_missing_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("qdrant_client", "indexer.store.qdrant"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    database = Database.parse("qdrant+http://host/care")
    assert database is not None
    with pytest.raises(BadDatabase, match=r"pip install 'care-search\[qdrant\]'"):
        database.connect()

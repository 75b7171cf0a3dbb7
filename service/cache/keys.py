"""Keys of cached values: digests that reveal nothing of a query.

Everything that a value depends on is in its key, so nothing is ever flushed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from pydantic import BaseModel

from models.encoder.tokenizer import Tokens

if TYPE_CHECKING:
    from service.serving.serving import Serving
    from service.settings import Settings

DIGEST_BYTES = 16
# Fields of a request that a result does not depend on; each query is added by itself.
NOT_IN_KEY = {"query", "timeout_ms", "bulk", "cache"}
# Settings that a result depends on: processes that share a Redis may differ in them.
SETTINGS_IN_KEY = ("default_mode", "vectors", "hyde_url", "hyde_model", "hyde_max_tokens", "max_top_k")
# Separates the parts of a key: neither versions nor JSON can hold it, and the query comes last.
END = b"\0"


class Kind(StrEnum):
    """What a value is: the JSON of one query's result, or the embedding of one text."""

    RESULT = "result"
    EMBEDDING = "embedding"


class ResultKeys:
    """Keys of results: snapshot, overlay, encoder, settings that matter, the whole request, the query."""

    def __init__(self, settings: Settings) -> None:
        self._settings = repr([getattr(settings, name) for name in SETTINGS_IN_KEY]).encode()

    def __call__(self, serving: Serving, request: BaseModel, queries: Sequence[str]) -> list[bytes]:
        """One key for each of these queries of the request, in order."""
        parameters = request.model_dump_json(exclude=NOT_IN_KEY).encode()
        encoder = serving.encoder
        served = serving.version.encode(), serving.overlay.state.hex().encode(), encoder.fingerprint.encode()
        facts = (*served, encoder.spec.query_instruction.encode(), self._settings, parameters, b"")
        shared = blake2b(END.join(facts), digest_size=DIGEST_BYTES)
        keys = []
        for query in queries:
            own = shared.copy()
            own.update(query.encode("utf-8", "surrogatepass"))
            keys.append(own.digest())
        return keys


def embedding_key(fingerprint: str, tokens: Tokens) -> bytes:
    """The key of a text by encoder and tokens alone, so that other requests and snapshots find its embedding."""
    return blake2b(fingerprint.encode() + END + array("q", tokens.ids).tobytes(), digest_size=DIGEST_BYTES).digest()

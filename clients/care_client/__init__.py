"""A client of CARE Search: plain (`CareClient`) or for asyncio (`AsyncCareClient`). Knows its HTTP interface only.

`care_client.langchain` and `care_client.llamaindex` hold the retrievers; each needs its framework to be installed.
"""

from care_client.aio import AsyncCareClient
from care_client.answers import (
    Changes,
    Collection,
    Document,
    Embeddings,
    Explanation,
    Health,
    Hit,
    Passage,
    Placing,
    Ranked,
    Result,
    SearchAnswer,
)
from care_client.calls import NewDocument, SearchOptions
from care_client.client import CareClient
from care_client.errors import (
    ApiError,
    BadAnswer,
    CareClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from care_client.retry import Retry

__all__ = [
    "ApiError",
    "AsyncCareClient",
    "BadAnswer",
    "CareClient",
    "CareClientError",
    "Changes",
    "Collection",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Document",
    "Embeddings",
    "Explanation",
    "Health",
    "Hit",
    "InvalidRequest",
    "NewDocument",
    "NotFound",
    "Overloaded",
    "Passage",
    "Placing",
    "Ranked",
    "Result",
    "Retry",
    "SearchAnswer",
    "SearchOptions",
    "Unavailable",
]

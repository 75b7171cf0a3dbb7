"""A client of CARE Search: plain (`CareClient`) or for asyncio (`AsyncCareClient`).

`care_client.langchain`, `care_client.llamaindex` and `care_client.haystack` hold the retrievers and rerankers,
`care_client.mcp` the tools for agents; each needs its framework to be installed.
"""

from care_client.answers import Changes as Changes
from care_client.answers import Collection as Collection
from care_client.answers import Document as Document
from care_client.answers import Embeddings as Embeddings
from care_client.answers import Explanation as Explanation
from care_client.answers import Health as Health
from care_client.answers import Hit as Hit
from care_client.answers import Passage as Passage
from care_client.answers import Placing as Placing
from care_client.answers import Ranked as Ranked
from care_client.answers import Result as Result
from care_client.answers import SearchAnswer as SearchAnswer
from care_client.calls import NewDocument as NewDocument
from care_client.calls import Retry as Retry
from care_client.calls import SearchOptions as SearchOptions
from care_client.client import AsyncCareClient as AsyncCareClient
from care_client.client import CareClient as CareClient
from care_client.errors import ApiError as ApiError
from care_client.errors import BadAnswer as BadAnswer
from care_client.errors import CareClientError as CareClientError
from care_client.errors import ConnectionFailed as ConnectionFailed
from care_client.errors import DeadlineExceeded as DeadlineExceeded
from care_client.errors import InvalidRequest as InvalidRequest
from care_client.errors import NotFound as NotFound
from care_client.errors import Overloaded as Overloaded
from care_client.errors import Unavailable as Unavailable

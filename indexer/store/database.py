"""Where vectors are searched: in the process that asks, which is the default, or in a vector database.

One text says it, for the service and for the indexer alike: `faiss`, or `qdrant+http://host:6333/alias`. The database's
client is loaded only by whoever connects. Knows nothing of what is stored there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from indexer.store.errors import BadDatabase

if TYPE_CHECKING:
    from indexer.store.qdrant import Qdrant

HERE = "faiss"
SCHEMES = {"qdrant+http": "http", "qdrant+https": "https"}
PORTS = {"http": 6333, "https": 443}


@dataclass(frozen=True, slots=True)
class Database:
    """A vector database that may or may not be there: its address, and the alias that names the served version."""

    url: str
    alias: str
    key: str | None = None
    timeout_seconds: int = 60

    @classmethod
    def parse(cls, text: str, key: str | None = None, timeout_seconds: int = 60) -> Database | None:
        """None for `faiss`; raises BadDatabase where the text is neither that nor an address."""
        if text == HERE:
            return None
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        prefix, _, alias = parts.path.rpartition("/")
        if parts.scheme not in SCHEMES or not parts.hostname or not alias or "@" in parts.netloc or parts.query:
            raise BadDatabase(f"{text!r} is neither {HERE} nor like qdrant+http://host:6333/alias")
        scheme = SCHEMES[parts.scheme]
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(f"{scheme}://{host}:{port or PORTS[scheme]}{prefix}", alias, key, timeout_seconds)

    def connect(self) -> Qdrant:
        """Its client; nothing is asked yet."""
        try:
            from indexer.store.qdrant import Qdrant
        except ImportError as error:
            raise BadDatabase(f"{self.url} needs the qdrant extra: pip install 'care-search[qdrant]'") from error
        return Qdrant.connect(self.url, self.alias, self.key, self.timeout_seconds)

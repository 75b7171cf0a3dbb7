"""Every knob of a deployment, read from the environment (`CARE_…`). Facts about artefacts are not settings."""

from __future__ import annotations

import re
import secrets
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from indexer.errors import BadDatabase
from indexer.store.collection import HERE, Database
from models.package import BUNDLED_ENCODER
from service.engine.protocol import Mode

ENV_PREFIX = "CARE_"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
HOST_NAME = re.compile(r"\*|[\w-]+(?:\.[\w-]+)*", re.ASCII)


class Settings(BaseSettings):
    """The settings of one service process; `docs/settings.md` lists them all."""

    # An empty variable means "not set": a compose file can pass every variable through.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    collection: Path = Field(
        default=Path("var/collection"), description="Collection folder: its published snapshot is served."
    )
    encoder: Path = Field(default=BUNDLED_ENCODER, description="Encoder folder that reads the queries.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="What encodes and searches: cpu or cuda.")
    vectors: str = Field(
        default=HERE, description="Where vectors are searched: faiss, here, or qdrant+http://host:6333/alias."
    )
    vectors_key: SecretStr | None = Field(default=None, description="Key of the vector database, where it wants one.")
    vectors_timeout_seconds: int = Field(
        default=2, ge=1, description="Longest wait for the vector database (503 beyond it)."
    )
    workers: int = Field(default=1, ge=1, le=256, description="HTTP processes that share the address and the snapshot.")
    engine: Literal["auto", "process"] = Field(
        default="auto",
        description="auto: each worker computes by itself on cpu, one process for all on cuda; process: always one.",
    )
    watchdog_seconds: float = Field(
        default=10.0, ge=0, description="The engine process is replaced once a query takes it so long; 0 never."
    )
    start_seconds: float = Field(
        default=600.0, gt=0, description="Longest start of a worker or the engine process, which is killed beyond it."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    encoder_threads: int = Field(
        default=1, ge=0, description="Threads of one encoding; 0 means one per core, which pays for large encoders."
    )
    threads: int = Field(default=0, ge=0, description="Threads of one large search; 0 means one per core.")

    default_mode: Mode = Field(
        default=Mode.HYBRID, description="Mode of a request that names none: dense, lexical or hybrid."
    )
    max_top_k: int = Field(default=100, ge=1, le=1000, description="Largest top_k that a request may ask for.")
    max_queries: int = Field(default=256, ge=1, description="Most queries in one request.")
    max_body_bytes: int = Field(
        default=2 * 1024 * 1024, ge=1024, description="Largest request body in bytes (413 beyond it)."
    )
    max_stream_queries: int = Field(
        default=10_000, ge=1, description="Most queries in one request whose answer is streamed."
    )
    max_filter_values: int = Field(
        default=1000, ge=1, le=32_000, description="Most values that the filters of one request name together."
    )
    max_answer_bytes: int = Field(
        default=8 * 1024 * 1024, ge=1024, description="Largest answer to a search that is not streamed, in bytes."
    )
    max_texts: int = Field(default=2048, ge=1, description="Most texts in one request of /v1/embeddings or /v1/rerank.")
    fresh_limit: int = Field(
        default=10_000,
        ge=0,
        description="Most passages of documents posted since the snapshot was built (409 beyond it).",
    )
    receive_seconds: float = Field(
        default=30.0, gt=0, description="Longest time that a request may take to arrive (408 beyond it)."
    )
    keep_alive_seconds: int = Field(
        default=75, ge=1, description="How long an idle connection is kept; longer than a proxy before it keeps one."
    )

    hyde_url: str | None = Field(
        default=None, description="OpenAI-compatible API, as http://host/v1, that imagines documents; unset: no HyDE."
    )
    hyde_model: str | None = Field(default=None, description="Model to ask there.")
    hyde_key: SecretStr | None = Field(default=None, description="Key to ask with, where one is needed.")
    hyde_timeout_ms: int = Field(
        default=3000, ge=1, description="Longest wait for imagined documents before the search goes on without them."
    )
    hyde_max_calls: int = Field(
        default=16, ge=1, description="Most documents that one request may have imagined, a call to the model each."
    )
    hyde_max_tokens: int = Field(default=256, ge=1, description="Longest document to imagine, in the model's tokens.")

    batch_queries: int | None = Field(
        default=None, ge=1, description="Most queries that the engine runs in one batch; unset: 8 on cpu, 256 on cuda."
    )
    batch_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens in one batch, padding included; unset: 4096 on cpu, 32768 on cuda."
    )
    queue_limit: int = Field(default=1024, ge=1, description="Queries that may wait for the engine (429 beyond it).")
    max_wait_ms: int = Field(
        default=50,
        ge=1,
        description="Longest time that a query may be expected to wait for its answer (429 beyond it).",
    )
    timeout_ms: int = Field(
        default=10_000, ge=1, description="Longest wait for an answer where the request names none (504 beyond it)."
    )

    lru_mb: int = Field(
        default=0, ge=0, description="Megabytes of results and embeddings kept in each process; 0: none."
    )
    redis_url: str | None = Field(
        default=None, description="Redis that processes share results and embeddings through."
    )
    redis_key: SecretStr = Field(
        default_factory=lambda: SecretStr(secrets.token_urlsafe()),
        description="Key that values in Redis are signed with; services that share values share it.",
    )
    redis_timeout_ms: int = Field(
        default=20, ge=1, description="Longest wait for Redis before a request goes on without it."
    )
    redis_ttl_seconds: int = Field(default=86_400, ge=1, description="How long Redis keeps a value.")

    reload_seconds: float = Field(
        default=2.0, ge=0, description="Seconds between looks at the pointer; 0 turns them off."
    )
    verify: bool = Field(
        default=True, description="Compare every file of a snapshot with its checksum when it is opened."
    )
    probe_timeout_ms: int = Field(
        default=5000, ge=1, description="Longest wait for the query behind /readyz and a swap."
    )
    shutdown_seconds: int = Field(default=30, ge=1, description="Longest wait for accepted requests at shutdown.")
    admin_token: SecretStr | None = Field(
        default=None,
        description="Bearer token of /admin and of changes to documents; unset: both are closed.",
    )
    allowed_hosts: str | None = Field(
        default=None,
        description="Host names that requests may name, with commas; * for any; unset: none on loopback, else any.",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="Least level that is logged."
    )
    access_log: bool = Field(default=False, description="Write one JSON line per request to standard output.")
    log_queries: bool = Field(default=False, description="Put the queries into the access log. They are medical: off.")

    @property
    def has_engine_process(self) -> bool:
        """Whether one process computes for all workers."""
        return self.engine == "process" or self.device == "cuda"

    @property
    def database(self) -> Database | None:
        """The vector database that searches, None where this machine does."""
        key = None if self.vectors_key is None else self.vectors_key.get_secret_value()
        return Database.parse(self.vectors, key, self.vectors_timeout_seconds)

    @field_validator("vectors")
    @classmethod
    def _is_a_database(cls, text: str) -> str:
        try:
            Database.parse(text)
        except BadDatabase as error:
            raise ValueError(str(error)) from error
        return text

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(REDIS_SCHEMES):
            raise ValueError(f"must begin with {', '.join(REDIS_SCHEMES)}")
        if url is not None and not _is_address(url):
            raise ValueError("has no port that is a number; write it as redis://host:6379/0")
        return url

    @field_validator("hyde_url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        if url is not None and not (_is_address(url) and urlsplit(url).hostname):
            raise ValueError("names no host and port; write it as http://host:8000/v1")
        return url

    @field_validator("vectors_key", "hyde_key", "admin_token")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        secret = "set" if key is None else key.get_secret_value()
        if not (secret.strip() and secret.isascii() and secret.isprintable()):
            raise ValueError("must be plain ASCII on one line, because it travels in a header")
        return key

    @field_validator("allowed_hosts")
    @classmethod
    def _are_host_names(cls, names: str | None) -> str | None:
        for name in [] if names is None else names.split(","):
            if not HOST_NAME.fullmatch(name.strip()):
                raise ValueError(f"{name.strip()!r} is not a host name; leave out scheme, port and path")
        return names

    @property
    def host_names(self) -> frozenset[str] | None:
        """Names that a Host header may have beside localhost and IP addresses; None: any name."""
        if self.allowed_hosts is None:
            return frozenset() if _is_loopback(self.host) else None
        names = frozenset(name.strip().lower() for name in self.allowed_hosts.split(","))
        return None if "*" in names else names

    @model_validator(mode="after")
    def _hyde_has_a_model(self) -> Settings:
        if self.hyde_url is not None and self.hyde_model is None:
            raise ValueError("CARE_HYDE_URL is set without CARE_HYDE_MODEL; name the model to ask there")
        return self

    @model_validator(mode="after")
    def _a_request_fits_the_queue(self) -> Settings:
        if self.max_queries > self.queue_limit:
            raise ValueError(f"CARE_MAX_QUERIES {self.max_queries} is larger than CARE_QUEUE_LIMIT {self.queue_limit}")
        return self


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(url: str) -> bool:
    """Whether a URL can be taken apart; its port, where there is one, must be a number."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False

"""All settings of a deployment, read from the environment (`CARE_…`)."""

from __future__ import annotations

import re
import secrets
from ipaddress import ip_address
from pathlib import Path
from socket import AI_PASSIVE, getaddrinfo
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from indexer.errors import BadDatabase
from indexer.store.collection import HERE, Database
from models.fusion import Mode
from models.package import BUNDLED_ENCODER, MOST_THREADS

ENV_PREFIX = "CARE_"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
ORIGIN = re.compile(r"\*|https?://[\w.-]+(?::\d+)?", re.ASCII)
HOST_NAME = re.compile(r"\*|[\w-]+(?:\.[\w-]+)*", re.ASCII)
# Comma-separated settings: the check of each item, and the message for a wrong one.
NAMES = {
    "allowed_hosts": (HOST_NAME, "a host name; leave out scheme, port and path"),
    "cors_origins": (ORIGIN, "an origin; write it as https://host or https://host:port"),
}


def setting(default: Any, description: str, **bounds: Any) -> Any:  # noqa: ANN401 (a field of any type)
    """Declares a setting with its default, its description and the bounds of its value."""
    return Field(default=default, description=description, **bounds)


class Settings(BaseSettings):
    """The settings of one service process; `docs/settings.md` lists them all."""

    # An empty variable means "not set": a compose file can pass every variable through.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    collection: Path = setting(Path("var/collection"), "Collection folder: its published snapshot is served.")
    encoder: Path = setting(BUNDLED_ENCODER, "Encoder folder that reads the queries.")
    reranker: Path | None = setting(None, "Reranker folder that orders the first hits if a request asks; unset: none.")
    device: Literal["cpu", "cuda"] = setting("cpu", "What encodes and searches: cpu or cuda.")
    vectors: str = setting(HERE, "Where vectors are searched: faiss, here, or qdrant+http://host:6333/alias.")
    vectors_key: SecretStr | None = setting(None, "Key of the vector database, if it needs one.")
    vectors_timeout_seconds: int = setting(2, "Longest wait for the vector database (503 beyond it).", ge=1)
    workers: int = setting(1, "HTTP processes that share the address and the snapshot.", ge=1, le=256)
    engine: Literal["auto", "process"] = setting(
        "auto", "auto: one engine process on cuda, none on cpu; process: always one."
    )
    watchdog_seconds: float = setting(10.0, "Replaces the engine process once a query takes this long; 0: never.", ge=0)
    start_seconds: float = setting(600.0, "Longest start of a worker or the engine; killed beyond it.", gt=0)
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    encoder_timeout_ms: int = setting(2000, "Longest wait for an encoder behind an address (503 beyond it).", ge=1)
    encoder_threads: int = setting(
        1, "Threads of one encoding; 0: one per core, for large encoders.", ge=0, le=MOST_THREADS
    )
    threads: int = setting(0, "Threads of one large search; 0 means one per core.", ge=0, le=MOST_THREADS)

    default_mode: Mode = setting(Mode.HYBRID, "Mode of a request that names none: dense, lexical or hybrid.")
    max_top_k: int = setting(100, "Largest top_k that a request may ask for.", ge=20, le=1000)
    max_queries: int = setting(256, "Most queries in one request.", ge=1)
    max_body_bytes: int = setting(2 * 1024 * 1024, "Largest request body in bytes (413 beyond it).", ge=1024)
    max_stream_queries: int = setting(10_000, "Most queries in one request whose answer is streamed.", ge=1)
    max_stream_bytes: int = setting(256 * 1024 * 1024, "Largest streamed answer in bytes.", ge=1024)
    max_stream_seconds: float = setting(600.0, "Longest time for a streamed answer.", gt=0)
    max_filter_values: int = setting(1000, "Most values in all filters of one request.", ge=1, le=32_000)
    max_answer_bytes: int = setting(8 * 1024 * 1024, "Largest answer in bytes, unless streamed.", ge=1024)
    max_texts: int = setting(2048, "Most texts (/v1/embeddings, /v1/rerank) or posted documents in one request.", ge=1)
    fresh_limit: int = setting(10_000, "Most passages posted since the snapshot was built (409 beyond it).", ge=0)
    receive_seconds: float = setting(30.0, "Longest time for a request to arrive (408 beyond it).", gt=0)
    keep_alive_seconds: int = setting(75, "How long an idle connection is kept; more than a proxy's.", ge=1)

    hyde_url: str | None = setting(None, "OpenAI-compatible API for HyDE, as http://host/v1; unset: no HyDE.")
    hyde_model: str | None = setting(None, "Model to ask there.")
    hyde_key: SecretStr | None = setting(None, "Key of that API, if it needs one.")
    hyde_timeout_ms: int = setting(3000, "Longest wait for HyDE's documents; then a plain search.", ge=1)
    hyde_max_calls: int = setting(16, "Most HyDE documents of one request, one call to the model each.", ge=1)
    hyde_max_tokens: int = setting(256, "Longest document to imagine, in the model's tokens.", ge=1)

    batch_queries: int | None = setting(None, "Most queries in one batch; unset: 8 on cpu, 256 on cuda.", ge=1)
    batch_tokens: int | None = setting(None, "Most tokens in one batch; unset: 4096 on cpu, 32768 on cuda.", ge=1)
    queue_limit: int = setting(1024, "Queries that may wait for the engine (429 beyond it).", ge=1)
    max_wait_ms: int = setting(50, "Longest expected wait of a query for its answer (429 beyond it).", ge=1)
    timeout_ms: int = setting(10_000, "Longest wait if the request names none (504 beyond it).", ge=1)

    lru_mb: int = setting(0, "Megabytes of results and embeddings kept in each process; 0: none.", ge=0)
    redis_url: str | None = setting(None, "Redis that processes share results and embeddings through.")
    redis_key: SecretStr = Field(
        default_factory=lambda: SecretStr(secrets.token_urlsafe()),
        description="Key that values in Redis are signed with; services that share values share it.",
    )

    redis_timeout_ms: int = setting(20, "Longest wait for Redis before a request goes on without it.", ge=1)
    redis_ttl_seconds: int = setting(86_400, "How long Redis keeps a value.", ge=1)

    reload_seconds: float = setting(2.0, "Seconds between looks at the pointer; 0 turns them off.", ge=0)
    verify: bool = setting(True, "Compare every file of a snapshot with its checksum when it is opened.")
    probe_timeout_ms: int = setting(5000, "Longest wait for the query behind /readyz and a swap.", ge=1)
    drain_seconds: float = setting(
        0.0, "How long /readyz fails after SIGTERM before the port is closed.", ge=0, le=86_400
    )
    shutdown_seconds: int = setting(30, "Longest wait for accepted requests at shutdown.", ge=1, le=86_400)
    admin_token: SecretStr | None = setting(None, "A key of every scope, beside those of the keys file.")
    keys_file: Path | None = setting(None, "File of API keys (care keys); unset: searching takes no key.")
    audit_log: Path | None = setting(None, "File that changes and administrators' acts are appended to.")
    admin_port: int | None = setting(None, "Port of /admin and /metrics alone; unset: CARE_PORT.", ge=0, le=65535)
    admin_host: str | None = setting(None, "Address of that port; unset: CARE_HOST.")
    tls_cert: Path | None = setting(None, "Certificate chain (PEM); with CARE_TLS_KEY the service speaks HTTPS.")
    tls_key: Path | None = setting(None, "Private key of the certificate (PEM).")
    tls_client_ca: Path | None = setting(None, "CA certificates (PEM) that sign the clients' certificates (mTLS).")
    cors_origins: str | None = setting(
        None, "Origins whose pages may call the service, with commas; * for any; unset: none."
    )
    max_connections: int = setting(0, "Most connections of each worker (503 beyond it); 0: any number.", ge=0)
    max_address_connections: int = setting(
        0, "Most connections of one address to each worker (429 beyond it); 0: any number.", ge=0
    )
    allowed_hosts: str | None = setting(
        None, "Host names that requests may name, with commas; * for any; unset: none on loopback, else any."
    )

    log_level: Literal["debug", "info", "warning", "error"] = setting("warning", "Lowest level that is logged.")
    access_log: bool = setting(False, "Write one JSON line per request to standard output.")
    log_queries: bool = setting(False, "Put the queries into the access log. They are medical: off.")
    traces_url: str | None = setting(
        None, "OpenTelemetry collector (OTLP over HTTP), as http://host:4318; unset: none."
    )
    traces_share: float = setting(1.0, "Share of requests that are traced if they bring no traceparent.", ge=0, le=1)
    traces_queries: bool = setting(False, "Put the queries into traces. They are medical: off.")

    @property
    def has_engine_process(self) -> bool:
        """Returns whether one process computes for all workers."""
        return self.engine == "process" or self.device == "cuda"

    @property
    def database(self) -> Database | None:
        """The vector database that searches, None if this machine does."""
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
        if url is not None and "?" in url:
            _require_redis_options(url)
        return url

    @field_validator("hyde_url", "traces_url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        if url is not None and not (_is_address(url) and urlsplit(url).hostname):
            raise ValueError("names no host and port; write it as http://host:8000, with its path")
        return url

    @field_validator("vectors_key", "hyde_key", "admin_token")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        secret = "set" if key is None else key.get_secret_value()
        if not (secret.strip() and secret.isascii() and secret.isprintable()):
            raise ValueError("must be plain ASCII on one line, because it travels in a header")
        return key

    @field_validator("allowed_hosts", "cors_origins")
    @classmethod
    def _are_names(cls, names: str | None, info: ValidationInfo) -> str | None:
        pattern, wrong = NAMES[info.field_name or ""]
        for name in map(str.strip, () if names is None else names.split(",")):
            if not pattern.fullmatch(name):
                raise ValueError(f"{name!r} is not {wrong}")
        return names

    @property
    def host_names(self) -> frozenset[str] | None:
        """Names that a Host header may have beside localhost and IP addresses; None: any name."""
        if self.allowed_hosts is None:
            return frozenset() if _is_loopback(self.host) else None
        names = frozenset(name.strip().lower() for name in self.allowed_hosts.split(","))
        return None if "*" in names else names

    @property
    def origins(self) -> list[str]:
        """Origins whose pages may call the service."""
        return [] if self.cors_origins is None else [origin.strip() for origin in self.cors_origins.split(",")]

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("CARE_TLS_CERT and CARE_TLS_KEY go together; set both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("CARE_TLS_CLIENT_CA is set without CARE_TLS_CERT and CARE_TLS_KEY; set them too")
        if self.admin_port == self.port != 0:  # both would answer /admin, also if their addresses differ
            raise ValueError("CARE_ADMIN_PORT is CARE_PORT, so /admin would be at both addresses; choose another port")
        if self.admin_host is not None and self.admin_port is None:
            raise ValueError("CARE_ADMIN_HOST is set without CARE_ADMIN_PORT; name the port, too")
        if self.hyde_url is not None and self.hyde_model is None:
            raise ValueError("CARE_HYDE_URL is set without CARE_HYDE_MODEL; name the model to ask there")
        if self.max_queries > self.queue_limit:
            raise ValueError(f"CARE_MAX_QUERIES {self.max_queries} is larger than CARE_QUEUE_LIMIT {self.queue_limit}")
        return self


def _is_loopback(host: str) -> bool:
    """Returns whether a server at this address or name, in whatever spelling, is reached from this machine alone."""
    try:
        found = getaddrinfo(host or None, None, flags=AI_PASSIVE)
    except OSError:
        return False  # the server says so when it listens
    addresses = [ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)


def _require_redis_options(url: str) -> None:
    """Raises ValueError if the client of Redis does not take the options of a URL; connects to nothing."""
    from redis.asyncio import ConnectionPool, RedisError  # a process without such a URL does not load it

    try:
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, RedisError) as error:
        reason = str(error).rpartition("() ")[2].rstrip(".")
        raise ValueError(f"has an option that redis-py does not take ({reason}); leave it out") from None


def _is_address(url: str) -> bool:
    """Returns whether a URL can be parsed; its port, if it has one, must be a number."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False

"""Settings: each has a working default, a description and an entry in docs/settings.md."""

from __future__ import annotations

from argparse import Namespace
from enum import Enum
from pathlib import Path

import pytest
from pydantic import ValidationError

from models.fusion import Mode
from models.package import BUNDLED_ENCODER
from service.command import FLAGS, read_settings
from service.errors import BadSettings
from service.settings import ENV_PREFIX, Settings

DOCS = Path("docs/settings.md")


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_is_described_and_documented(name: str) -> None:
    field = Settings.model_fields[name]
    default = field.default.value if isinstance(field.default, Enum) else field.default
    default = "the bundled encoder" if default == BUNDLED_ENCODER else default
    shown = "unset" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    if field.default_factory is not None:
        shown = "random"
    assert field.description
    row = f"| `{ENV_PREFIX}{name.upper()}` | {shown} | {field.description} |"
    assert row in DOCS.read_text(encoding="utf-8").splitlines()


def test_the_documentation_names_no_setting_that_does_not_exist() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{ENV_PREFIX}")]
    assert len(rows) == len(Settings.model_fields)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARE_PORT", "9000")
    monkeypatch.setenv("CARE_DEFAULT_MODE", "dense")
    monkeypatch.setenv("CARE_REDIS_URL", "")
    monkeypatch.setenv("CARE_ADMIN_TOKEN", "very secret")
    settings = Settings()
    assert (settings.port, settings.default_mode, settings.redis_url) == (9000, Mode.DENSE, None)
    assert "very secret" not in repr(settings)


@pytest.mark.parametrize(
    "values",
    [{"port": 70000}, {"max_queries": 2000}, {"max_top_k": 19}, {"default_mode": "best"}, {"redis_url": "http://x"}],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CARE_MAX_TOPK", "5", "CARE_MAX_TOPK: there is no such setting; did you mean CARE_MAX_TOP_K?"),
        ("CARE_PORT", "http", "CARE_PORT: Input should be a valid integer"),
        ("CARE_SHUTDOWN_SECONDS", "10000000000", "CARE_SHUTDOWN_SECONDS: Input should be less than or equal to 86400"),
        ("CARE_ENCODER_THREADS", "5000", "CARE_ENCODER_THREADS: Input should be less than or equal to 1024"),
        ("CARE_MAX_QUERIES", "5000", "CARE_MAX_QUERIES 5000 is larger than CARE_QUEUE_LIMIT 1024"),
        ("CARE_REDIS_URL", "localhost", "CARE_REDIS_URL: must begin with redis://"),
        ("CARE_REDIS_URL", "redis://:secret@host:port/0", "CARE_REDIS_URL: has no port that is a number"),
        ("CARE_HYDE_URL", "http://host:port/v1", "CARE_HYDE_URL: names no host and port"),
        ("CARE_HYDE_URL", "http:///v1", "CARE_HYDE_URL: names no host and port"),
        ("CARE_HYDE_URL", "http://[host/v1", "CARE_HYDE_URL: names no host and port"),
        ("CARE_HYDE_URL", "http://host/v1", "CARE_HYDE_URL is set without CARE_HYDE_MODEL"),
        ("CARE_ADMIN_PORT", "8000", "CARE_ADMIN_PORT is CARE_PORT, so /admin would be at both addresses"),
        ("CARE_ADMIN_HOST", "127.0.0.1", "CARE_ADMIN_HOST is set without CARE_ADMIN_PORT"),
        ("CARE_HYDE_KEY", "schlüssel", "CARE_HYDE_KEY: must be plain ASCII on one line"),
        ("CARE_ADMIN_TOKEN", "secret\n", "CARE_ADMIN_TOKEN: must be plain ASCII on one line"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSettings) as refused:
        read_settings(Namespace(**dict.fromkeys(FLAGS)))
    assert str(refused.value).startswith(message)
    assert "docs/settings.md" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_settings_that_could_expose_queries_are_off_by_default() -> None:
    settings = Settings()
    assert not settings.log_queries
    assert settings.redis_url is None
    assert settings.lru_mb == 0
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize("option", ["socket_timeout=soon", "foo=bar", "db=x"])
def test_an_option_that_redis_does_not_take_is_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"redis-py does not take .*{option.partition('=')[0]}"):
        Settings(redis_url=f"redis://127.0.0.1:6379/0?{option}")


def test_options_of_redis_that_can_be_used_are_taken() -> None:
    for url in ("unix:///run/redis.sock?db=1", "rediss://cache/0?ssl_cert_reqs=none"):
        assert Settings(redis_url=url).redis_url == url
    with pytest.raises(ValueError, match="redis-py does not take"):
        Settings(redis_url="rediss://cache/0?ssl_cert_reqs=foo")

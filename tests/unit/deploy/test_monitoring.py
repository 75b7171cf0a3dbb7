"""Prometheus' files and the operator's page, against what the service really exposes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from indexer.reindex import write_metrics
from service.http import admin, search
from service.metrics import Metrics, Timings
from service.settings import Settings
from tests.unit.deploy.support import REPOSITORY, compose, load_yaml, parse_care
from tests.unit.indexer.support import RUN

SCRAPES: list[dict[str, Any]] = load_yaml("deploy/prometheus.yml")["scrape_configs"]
RULES: list[dict[str, Any]] = load_yaml("deploy/alerts.yml")["groups"][0]["rules"]
OPERATIONS = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
SELECTOR = re.compile(r"\b(care_\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of the samples that a service exposes after a little of everything, and a run of the indexer writes."""
    metrics = Metrics()
    metrics.request(search.PATH, 200, 0.01)
    metrics.search(1, Timings())
    metrics.batch(1, 0.001, 0)
    metrics.swap("20261115T041500123Z-1a2b3c4d", 400)
    metrics.restart("worker")
    write_metrics(run_file := tmp_path_factory.mktemp("metrics") / "care.prom", RUN, 0.0, 0.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.expose().decode() + run_file.read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_prometheus_scrapes_the_service_where_it_exposes() -> None:
    (scrape,) = SCRAPES
    ((host, port),) = (target.split(":") for target in scrape["static_configs"][0]["targets"])
    assert parse_care(compose()["services"][host]["command"]).keys() >= {"host", "port"}
    assert int(port) == Settings.model_fields["port"].default
    assert scrape["metrics_path"] in {route.path for route in admin.health.routes if isinstance(route, APIRoute)}


def test_prometheus_finds_the_rules() -> None:
    mounts = dict(mount.split(":")[:2] for mount in compose()["services"]["prometheus"]["volumes"])
    folder = Path(mounts["./deploy/prometheus.yml"]).parent
    (rules,) = load_yaml("deploy/prometheus.yml")["rule_files"]
    assert mounts["./deploy/alerts.yml"] == str(folder / rules)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exposed(rule: dict[str, Any], exposed: dict[str, set[str]]) -> None:
    assert_exposed(rule["expr"], exposed)
    assert rule["annotations"]["summary"]
    jobs = set(re.findall(r'job="(\w+)"', rule["expr"]))
    assert jobs <= {scrape["job_name"] for scrape in SCRAPES}


def test_history_is_kept_for_longer_than_the_alerts_look_back() -> None:
    (kept,) = re.findall(r"retention\.time=(\d+)d", " ".join(compose()["services"]["prometheus"]["command"]))
    days = [int(number) for rule in RULES for number in re.findall(r"(\d+)d\b", rule["expr"])]
    assert int(kept) > max(days)


def test_the_page_for_operators_names_what_exists(exposed: dict[str, set[str]]) -> None:
    assert_exposed(OPERATIONS, exposed)
    assert all(f"`{rule['alert']}`" in OPERATIONS for rule in RULES)
    variables = {name.lower() for name in re.findall(r"\bCARE_(\w+)", OPERATIONS)}
    assert variables <= Settings.model_fields.keys()


def assert_exposed(text: str, exposed: dict[str, set[str]]) -> None:
    for name, matchers in SELECTOR.findall(text):
        assert name in exposed
        assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= exposed[name]

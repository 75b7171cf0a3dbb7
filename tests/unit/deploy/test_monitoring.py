"""Prometheus' files and docs/operations.md against the metrics that the service exposes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from indexer.report import write_metrics
from service.http import admin
from service.http.asgi import SEARCH_PATH
from service.metrics import Metrics, Timings
from service.settings import Settings
from tests.unit.deploy.support import REPOSITORY, compose, load_yaml, parse_care
from tests.unit.indexer.support import RUN

SCRAPES: list[dict[str, Any]] = load_yaml("deploy/prometheus.yml")["scrape_configs"]
CASES = ("tests/unit/deploy/alerts.yml", "tests/unit/deploy/alerts_days.yml")
RULES: list[dict[str, Any]] = load_yaml("deploy/alerts.yml")["groups"][0]["rules"]
OPERATIONS = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy/grafana/care.json").read_text(encoding="utf-8"))
SELECTOR = re.compile(r"\b(care_\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Returns the samples that a service exposes after some use, and those that a run of the indexer writes."""
    metrics = Metrics()
    metrics.request(SEARCH_PATH, 200, 0.01)
    metrics.search(1, Timings())
    metrics.batch(1, 5, 0.001, 0)
    metrics.swap("20261115T041500123Z-1a2b3c4d", 400, 0.0)
    metrics.restart("worker")
    write_metrics(run_file := tmp_path_factory.mktemp("metrics") / "care.prom", RUN, 0.0, 0.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.expose().decode() + run_file.read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_prometheus_scrapes_the_port_and_path_of_the_service() -> None:
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
def test_an_alert_uses_only_exposed_metrics(rule: dict[str, Any], exposed: dict[str, set[str]]) -> None:
    assert_exposed(rule["expr"], exposed)
    assert rule["annotations"]["summary"]
    jobs = set(re.findall(r'job="(\w+)"', rule["expr"]))
    assert jobs <= {scrape["job_name"] for scrape in SCRAPES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: `make programs` installs it")
@pytest.mark.parametrize("arguments", [("check", "config", "deploy/prometheus.yml"), ("test", "rules", *CASES)])
def test_promtool_accepts_the_files_and_every_alert_fires_when_it_should(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    tests = [test for path in CASES for test in load_yaml(path)["tests"]]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == {rule["alert"] for rule in RULES}


def test_history_is_kept_for_longer_than_alerts_and_panels_look_back() -> None:
    (kept,) = re.findall(r"retention\.time=(\d+)d", " ".join(compose()["services"]["prometheus"]["command"]))
    asked = [rule["expr"] for rule in RULES] + expressions()
    assert int(kept) > max(int(number) for expr in asked for number in re.findall(r"(\d+)d\b", expr))


def test_the_operations_page_names_only_existing_metrics(exposed: dict[str, set[str]]) -> None:
    assert_exposed(OPERATIONS, exposed)
    assert all(f"`{rule['alert']}`" in OPERATIONS for rule in RULES)
    variables = {name.lower() for name in re.findall(r"\bCARE_(\w+)", OPERATIONS)}
    assert variables <= Settings.model_fields.keys()


def expressions() -> list[str]:
    """Returns the Prometheus queries of the dashboard's panels."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_fills_its_rows_and_explains_each_panel() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells) == 24 * (1 + max(y for _, y in cells))  # no overlap, no gap
    assert all(panel["title"] and panel["description"] for panel in panels)


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    mounts = dict(mount.split(":")[:2] for mount in compose()["services"]["grafana"]["volumes"])
    (provider,) = load_yaml("deploy/grafana/dashboards.yml")["providers"]
    home = compose()["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounts["./deploy/grafana/care.json"] == home == f"{provider['options']['path']}/care.json"
    (source,) = load_yaml("deploy/grafana/datasources.yml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert compose()["services"][host]["ports"][0].endswith(f":{port}")


def assert_exposed(text: str, exposed: dict[str, set[str]]) -> None:
    for name, matchers in SELECTOR.findall(text):
        assert name in exposed
        assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= exposed[name]

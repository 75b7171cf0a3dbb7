"""Every metric and label that the dashboard queries is in /metrics of a running service that answered a search."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.encoder.onnx import OnnxEncoder
from tests.api.support import build_collection, make_settings, running

pytestmark = pytest.mark.anyio
PANELS = json.loads(Path("deploy/grafana/care.json").read_text(encoding="utf-8"))["panels"]
# A metric name, its label selector in braces, and the labels kept by the sum around it.
SELECTOR = re.compile(r"\b(care_\w+)(?:\{([^}]*)\})?")
KEPT = re.compile(r"\bby \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
async def test_a_panel_queries_only_metrics_that_the_service_exposes(
    panel: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    for target in panel["targets"]:
        names = SELECTOR.findall(target["expr"])
        assert names
        for name, matchers in names:
            assert name in exposed
            wanted = set(re.findall(r"(\w+)\s*(?:=|!)", matchers))
            wanted |= {label.strip() for group in KEPT.findall(target["expr"]) for label in group.split(",")}
            assert wanted - OF_PROMETHEUS <= exposed[name]
        assert set(re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))) <= exposed[name] | OF_PROMETHEUS


@pytest.fixture(scope="module")
async def exposed(tmp_path_factory: pytest.TempPathFactory, encoder: OnnxEncoder) -> dict[str, set[str]]:
    """Returns the names of a service's samples with their labels."""
    built = build_collection(tmp_path_factory.mktemp("dashboard") / "collection", encoder, letters="a")
    async with running(make_settings(built)) as client:
        assert (await client.get("/v1/search", params={"q": "高血压"})).status_code == 200
        text = (await client.get("/metrics")).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found

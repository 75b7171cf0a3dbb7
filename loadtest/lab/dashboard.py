"""`make dashboard`: draws the panels of deploy/grafana/care.json from a real Prometheus during a short load.

  python -m loadtest.lab.dashboard --output docs/dashboard.png

A service with two workers serves the example corpus while more and more connections ask, and a second version is
published half way. Prometheus (Debian's package) reads its metrics every second and answers each panel's own query; the
picture is drawn by matplotlib, not by Grafana, so that it needs no container.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.answers import read_queries
from loadtest.harness import HOST, QUERIES, REPOSITORY, BenchError, above_zero
from loadtest.harness.report import Program, exit_with, say
from loadtest.harness.servers import CACHE, CORPUS, Server, build_example, care_server, free_port, get, running
from loadtest.lab.crowd import Crowd

DASHBOARD = REPOSITORY / "deploy/grafana/care.json"
WORKERS = "2"
CONNECTIONS = (1, 4, 16)
RATE_SECONDS = 10
UNITS = {"s": (1000.0, "ms"), "percentunit": (100.0, "%"), "reqps": (1.0, "/s"), "ops": (1.0, "/s"), "short": (1.0, "")}
Series = tuple[str, Sequence[float], Sequence[float]]
"""A name, times since 1970 and values."""


def record(step_seconds: float) -> dict[str, list[Series]]:
    """Runs service, Prometheus and load; returns the series of each panel by its title."""
    if shutil.which("prometheus") is None:
        raise BenchError("there is no program prometheus; `make programs` installs it")
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    requests: list[dict[str, Any]] = [{"query": query} for query in read_queries(QUERIES)]
    with tempfile.TemporaryDirectory(prefix="care-dashboard-") as scratch:
        folder = Path(scratch)
        collection = build_example(folder / "collection")
        service = care_server(collection, CACHE, "--workers", WORKERS)
        with running(service, folder) as started, running(_prometheus(service.port, folder), folder) as prometheus:
            began = time.time()
            for at, connections in enumerate(CONNECTIONS):
                # The second half of each step goes past the cache, so that the engine has work.
                for cached in (True, False):
                    with Crowd(started.url, connections, requests, lambda *pair: False).asking(cache=cached):
                        time.sleep(step_seconds / 2)
                if at == 0:
                    build_example(collection, _changed(folder))
            return {panel["title"]: list(_ask(prometheus.url, panel, began, time.time())) for panel in panels}


def _changed(folder: Path) -> Path:
    """Returns the example corpus with one more document."""
    corpus = folder / "corpus.jsonl"
    one_more = json.dumps({"_id": "notice-7", "title": "缬沙坦召回", "text": "部分批次自即日起召回。"})
    text = (REPOSITORY / CORPUS).read_text(encoding="utf-8")
    corpus.write_text(f"{text.rstrip()}\n{one_more}\n", encoding="utf-8")
    return corpus


def _prometheus(port: int, folder: Path) -> Server:
    config = folder / "prometheus.yml"
    job = {"job_name": "care", "static_configs": [{"targets": [f"{HOST}:{port}"]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}), encoding="utf-8")
    own = free_port()
    options = {"config.file": config, "storage.tsdb.path": folder / "series", "web.listen-address": f"{HOST}:{own}"}
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    return Server("prometheus", command, own, ready="/-/ready")


def _ask(url: str, panel: Mapping[str, Any], start: float, end: float) -> Iterable[Series]:
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", f"{RATE_SECONDS}s")
        query = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": 1})
        status, body = get(url, f"/api/v1/query_range?{query}")
        answer = json.loads(body)
        if status != 200:
            raise BenchError(f"panel {panel['title']}: Prometheus refused {expression}: {answer.get('error')}")
        for series in answer["data"]["result"]:
            name = target.get("legendFormat", "")
            for label, value in series["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            yield name, [float(at) for at, _ in series["values"]], [float(value) for _, value in series["values"]]


def draw(found: Mapping[str, Sequence[Series]], path: Path) -> None:
    """Draws one picture with the dashboard's own places, titles and units."""
    from matplotlib.figure import Figure

    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(16, rows * 0.38), layout="constrained")
    grid = figure.add_gridspec(rows, 24)
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]])
        factor, unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        axes.set_title(panel["title"], fontsize=9, loc="left")
        if panel["type"] == "stat":
            axes.axis("off")
            (value,) = [values[-1] for _, _, values in found[panel["title"]]] or [float("nan")]
            text = f"{value:.0f} s" if unit == "ms" and value > 1 else f"{value * factor:,.4g} {unit}"
            axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=18)
            continue
        for name, times, values in found[panel["title"]]:
            at = [datetime.fromtimestamp(each) for each in times]
            axes.plot(at, [value * factor for value in values], linewidth=1, label=name)  # type: ignore[arg-type]
        axes.set_ylabel(unit, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=6)
        if found[panel["title"]]:
            axes.legend(fontsize=6, loc="upper left", frameon=False)
    figure.savefig(path, dpi=80)


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("dashboard", "loadtest.lab.dashboard", __doc__)
    program.add_argument("--output", type=Path, default=Path("var/dashboard.png"))
    program.add_argument("--step-seconds", type=above_zero, default=30.0, help="of each number of connections")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    found = record(options.step_seconds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(found, options.output)
    empty = [title for title, series in found.items() if not series]
    say(f"{len(found)} panels in {options.output}" + (f"; without data: {', '.join(empty)}" if empty else ""))
    return 1 if empty else 0


if __name__ == "__main__":
    exit_with(main)

"""Reports the result of a re-index: as one line, to Prometheus's textfile collector and to a webhook.

Neither of the last two can fail a run: their errors go to standard error.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from indexer.build import BuildSummary
from indexer.corpus import listed
from indexer.store.collection import Collection

WEBHOOK_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Report:
    """Where the result of a run is reported."""

    metrics_file: Path | None = None
    webhook: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. `summary` is None if it failed; `published`: the version is served now."""

    line: str
    seconds: float
    summary: BuildSummary | None = None
    published: bool = False

    @property
    def status(self) -> str:
        return "failed" if self.summary is None else self.summary.status(published=self.published)


def send(report: Report, collection: Collection, outcome: Outcome) -> None:
    """Writes the metrics and calls the webhook, as far as the report names them."""
    if report.metrics_file:
        served = collection.served_manifest()
        write_metrics(report.metrics_file, outcome, time.time(), served.created.timestamp() if served else None)
    if report.webhook:
        call_webhook(report.webhook, outcome)


def summary_line(summary: BuildSummary, *, published: bool, removed: int, seconds: float) -> str:
    """Writes one line with everything that an operator reads first."""
    counts, changes = summary.counts, summary.changes
    repeats = counts.passages - summary.encoded - summary.reused
    repeated = f", {repeats} repeated" if repeats else ""
    facts = [
        f"{counts.documents} documents ({changes.added} added, {changes.changed} changed, {changes.removed} removed)",
        f"{counts.passages} passages ({summary.encoded} encoded, {summary.reused} reused{repeated})",
        f"{summary.index} index" + (f" with recall {summary.recall.at_10:.3f}" if summary.recall else ""),
    ]
    if summary.posted:
        facts.append(f"{summary.posted} of the documents posted to the service and in no corpus")
    if summary.rejects_file:
        facts.append(f"{counts.rejects} bad rows set aside in {summary.rejects_file}")
    if summary.ignored:
        facts.append(f"columns that were not kept: {listed(summary.ignored)} (keep them with --metadata-field NAME)")
    if removed:
        facts.append(f"old versions removed: {removed}")
    stages = ", ".join(f"{name} {value:.1f}" for name, value in summary.seconds.items())
    facts.append(f"{seconds:.1f} s ({stages})")
    return f"{summary.status(published=published)} {summary.version}: {', '.join(facts)}"


def write_metrics(path: Path, outcome: Outcome, now: float, published_at: float | None) -> None:
    """Replaces the file atomically; `published_at` is when the served version was built, None if none is served."""
    registry = CollectorRegistry()

    def gauge(name: str, meaning: str, value: float) -> None:
        Gauge(f"care_index_{name}", meaning, registry=registry).set(value)

    def gauges(name: str, meaning: str, label: str, values: dict[str, float]) -> None:
        metric = Gauge(f"care_index_{name}", meaning, [label], registry=registry)
        for key, value in values.items():
            metric.labels(key).set(value)

    gauge("run_success", "1 if the last run succeeded.", outcome.summary is not None)
    gauge("run_end_timestamp_seconds", "When the last run ended.", now)
    gauge("run_seconds", "How long the last run took.", outcome.seconds)
    if published_at is not None:
        gauge("published_timestamp_seconds", "When the served version was built.", published_at)
    if summary := outcome.summary:
        gauge("documents", "Documents of the last version built.", summary.counts.documents)
        gauge("passages", "Passages of the last version built.", summary.counts.passages)
        gauge("rejects", "Rows that the last run set aside.", summary.counts.rejects)
        gauge("encoded_passages", "Texts that the last run encoded.", summary.encoded)
        gauge("reused_passages", "Passages whose vector the last run knew.", summary.reused)
        changes = {name: getattr(summary.changes, name) for name in ("added", "changed", "removed")}
        gauges("changed_documents", "Documents by what the last run did to them.", "change", changes)
        gauges("stage_seconds", "How long each stage of the last run took.", "stage", summary.seconds)
        if summary.recall:
            gauge("recall", "Recall@10 of the last version built.", summary.recall.at_10)
    try:
        place = path.resolve()  # a link stays
        if place.exists() and not place.is_file():  # a rename would put a file in the place of a device
            warn(f"the metrics were not written to {path}, which is not a file; name one that ends in .prom")
            return
        write_to_textfile(str(place), registry)
    except OSError as error:
        warn(f"the metrics could not be written to {path} ({error.strerror})")


def call_webhook(url: str, outcome: Outcome) -> None:
    """Posts JSON: `status`, `version` (null if it failed), `seconds`, and the line as `text`, as chats expect it."""
    fields = {
        "status": outcome.status,
        "version": outcome.summary.version if outcome.summary else None,
        "seconds": round(outcome.seconds, 1),
        "text": outcome.line,
    }
    body = json.dumps(fields, ensure_ascii=False).encode()

    def post() -> None:
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
            urllib.request.urlopen(request).close()
        except (OSError, ValueError, HTTPException) as error:  # HTTP errors and refused connections are OSErrors
            warn(f"the webhook failed ({error})")

    # In a thread that is left behind: urllib's timeout covers each read, not the whole call or name resolution.
    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(WEBHOOK_TIMEOUT_SECONDS)
    if thread.is_alive():
        warn(f"the webhook has not answered within {WEBHOOK_TIMEOUT_SECONDS:g} s")


def warn(message: str) -> None:
    print(f"care index: {message}", file=sys.stderr)

"""What a run tells those who did not watch it: a line, Prometheus's textfile collector, a webhook.

Neither the metrics nor the webhook can fail a run: what goes wrong with them is a line on standard error.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from indexer.build import BuildSummary
from indexer.corpus import listed

WEBHOOK_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `summary` is None where it failed; `published` says whether the version is served now."""

    line: str
    seconds: float
    summary: BuildSummary | None = None
    published: bool = False

    @property
    def status(self) -> str:
        if self.summary is None:
            return "failed"
        return self.summary.status(published=self.published)


def summary_line(summary: BuildSummary, *, published: bool, removed: int, seconds: float) -> str:
    """Everything that an operator reads first, in one line."""
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
    """Replaces the file at once; `published_at` is when the served version was built, None where none is served."""
    registry = CollectorRegistry()

    def gauge(name: str, meaning: str, value: float, **labels: str) -> None:
        metric = known.get(name) or known.setdefault(name, Gauge(name, meaning, list(labels), registry=registry))
        (metric.labels(**labels) if labels else metric).set(value)

    known: dict[str, Gauge] = {}
    gauge("care_index_run_success", "1 if the last run succeeded.", outcome.summary is not None)
    gauge("care_index_run_end_timestamp_seconds", "When the last run ended.", now)
    gauge("care_index_run_seconds", "How long the last run took.", outcome.seconds)
    if published_at is not None:
        gauge("care_index_published_timestamp_seconds", "When the served version was built.", published_at)
    if summary := outcome.summary:
        gauge("care_index_documents", "Documents of the last version built.", summary.counts.documents)
        gauge("care_index_passages", "Passages of the last version built.", summary.counts.passages)
        gauge("care_index_rejects", "Rows that the last run set aside.", summary.counts.rejects)
        gauge("care_index_encoded_passages", "Texts that the last run encoded.", summary.encoded)
        gauge("care_index_reused_passages", "Passages whose vector the last run knew.", summary.reused)
        for change in ("added", "changed", "removed"):
            count = getattr(summary.changes, change)
            gauge("care_index_changed_documents", "Documents by what the last run did to them.", count, change=change)
        for stage, seconds in summary.seconds.items():
            gauge("care_index_stage_seconds", "How long each stage of the last run took.", seconds, stage=stage)
        if summary.recall:
            gauge("care_index_recall", "Recall@10 of the last version built.", summary.recall.at_10)
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        _warn(f"the metrics could not be written to {path} ({error.strerror})")


def call_webhook(url: str, outcome: Outcome) -> None:
    """Posts JSON: `status`, `version` (null where it failed), `seconds`, and the line as `text`, as chats want it."""
    fields = {
        "status": outcome.status,
        "version": outcome.summary.version if outcome.summary else None,
        "seconds": round(outcome.seconds, 1),
        "text": outcome.line,
    }
    body = json.dumps(fields, ensure_ascii=False).encode()
    # In a thread that is left behind: a time-out of urllib's is that of each read, and none that of a name server.
    teller = threading.Thread(target=_post, args=(url, body), name="webhook", daemon=True)
    teller.start()
    teller.join(WEBHOOK_TIMEOUT_SECONDS)
    if teller.is_alive():
        _warn(f"the webhook has not answered within {WEBHOOK_TIMEOUT_SECONDS:g} s")


def _post(url: str, body: bytes) -> None:
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        urllib.request.urlopen(request).close()
    except (OSError, ValueError, HTTPException) as error:  # HTTP errors and refused connections are OSErrors
        _warn(f"the webhook was not told ({error})")


def _warn(message: str) -> None:
    print(f"care index: {message}", file=sys.stderr)

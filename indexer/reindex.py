"""One run of the indexer as a schedule starts it: build, check, publish, remove old versions, report.

A run is reported as a line, to Prometheus's textfile collector and to a webhook. Neither of the last two can fail a
run: their errors go to standard error.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib import import_module
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from indexer.build import BuildOptions, BuildSummary, admitted, build
from indexer.checks import check_canaries, load_queries, recall_queries
from indexer.cluster import Cluster
from indexer.corpus import listed
from indexer.devices import DeviceEncoder, is_spread
from indexer.encode import Encoder
from indexer.errors import BadBuild, BadSnapshot, Blocked, Busy
from indexer.store.canaries import keep_canaries, kept_canaries, load_canaries
from indexer.store.collection import Collection
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from indexer.versions import Measure, prune, publish, verify
from models.encoder.address import AddressEncoder, load_encoder
from models.encoder.onnx import OnnxEncoder, Vectors
from models.encoder.spec import EncoderSpec, Precision, Side, Variant
from models.encoder.tokenizer import has_graph

# The share of the served documents that a new version may lack by default.
MAX_REMOVED = 0.2
WEBHOOK_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Encoders:
    """The folder that reads documents, how it runs, and the folder that reads queries (None: the same).

    A server runs a folder that has an address, ONNX Runtime one that has a graph, torch any other; a precision asks for
    torch. `devices` are names as `indexer.devices.parse_devices` gives them; none: by the encoder. `ray` is the address
    of the cluster that encodes the documents; None: this machine does.
    """

    documents: Path
    variant: Variant | None = None
    queries: Path | None = None
    threads: int = 0
    devices: tuple[str, ...] = ()
    precision: Precision | None = None
    token_budget: int | None = None
    ray: str | None = None

    @property
    def device(self) -> str | None:
        return self.devices[0] if self.devices else None

    def on(self, device: str) -> Encoder:
        """Opens the encoder of documents on one device, as `indexer.devices.Open`."""
        return replace(self, devices=(device,)).load()

    def load(self) -> Encoder:
        if is_spread(self.devices):
            if self.ray is not None:
                raise BadBuild("--ray finds the devices of its nodes; give --device cpu or cuda, or leave it out")
            return DeviceEncoder(self.devices, replace(self, documents=self.documents.absolute()).on)
        weights = any(self.documents.glob("*.safetensors"))
        by_torch = self.precision is not None or (weights and not has_graph(self.documents))
        if EncoderSpec.load(self.documents).address is not None and (self.variant or self.device or self.precision):
            raise BadBuild(f"{self.documents} is run by a server; leave --variant, --device and --precision out")
        if by_torch and self.variant is not None:
            raise BadBuild(f"--variant {self.variant}: {self.documents} is read by torch; leave it out, or --precision")
        if not by_torch:
            return load_encoder(self.documents, self.variant, device=self.device or "cpu", threads=self.threads)
        try:  # by name: a build by ONNX graphs needs no torch
            packed = import_module("models.encoder.packed.encoder")
        except ModuleNotFoundError as error:
            raise BadBuild(
                f"{self.documents} is read by torch, which is not here: install care-search[train]"
            ) from error
        options = {"device": self.device, "precision": self.precision, "token_budget": self.token_budget}
        encoder: Encoder = packed.PackedEncoder.load(self.documents, threads=self.threads, **options)
        return encoder

    def cluster(self, documents: Encoder) -> Cluster | None:
        """The cluster whose nodes open the same folder with the same options, by default with one thread."""
        if self.ray is None:
            return None
        processors = self.threads or 1
        there = replace(self, documents=self.documents.absolute(), threads=processors)
        by_torch = isinstance(documents.variant, Precision)
        gpus = self.device == "cuda" or (by_torch and self.device is None)
        cluster = Cluster(self.ray, there.load, processors, gpus)
        cluster.require()
        return cluster

    def load_queries(self, documents: Encoder) -> Encoder:
        """Opens the encoder of queries; raises BadBuild if it does not fit these documents."""
        same = self.queries in (None, self.documents) and isinstance(documents, OnnxEncoder | AddressEncoder)
        encoder = documents if same or not self.queries else load_encoder(self.queries, threads=self.threads)
        if Side.QUERY not in encoder.spec.sides:
            raise BadBuild(
                f"{self.queries or self.documents} reads documents only; name its partner with --query-encoder"
            )
        own, others = encoder.spec, documents.spec
        if own.space != others.space:
            raise BadBuild(f"{self.queries} is of space {own.space}, not {others.space}")
        if own.dim != others.dim:
            raise BadBuild(f"{self.queries} gives {own.dim} dimensions, {self.documents} {others.dim}")
        return encoder


@dataclass(frozen=True)
class Release:
    """What a version must pass, and what happens to it. None: not asked for.

    `queries` measure the recall of its index, `canaries` must pass; `max_removed` is the share of the served documents
    that it may lack.
    """

    publish: bool = False
    max_removed: float = MAX_REMOVED
    queries: Path | None = None
    canaries: Path | None = None
    keep: int | None = None
    keep_days: float | None = None


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


def reindex(
    corpus: Sequence[Path],
    collection: Collection,
    encoders: Encoders,
    options: BuildOptions,
    release: Release,
    report: Report,
) -> str:
    """Runs and returns the result line. Every error is reported before it is raised, except Busy."""
    started = time.monotonic()
    try:
        summary, removed = _run(corpus, collection, encoders, options, release)
    except Busy:
        raise
    except BaseException as error:  # a stopped run is no success either
        reason = " ".join(str(error).split()) or type(error).__name__
        line = reason if isinstance(error, Exception) else "stopped before its end; the same command goes on"
        _send(report, collection, Outcome(line, time.monotonic() - started))
        raise
    seconds = time.monotonic() - started
    line = summary_line(summary, published=release.publish, removed=removed, seconds=seconds)
    _send(report, collection, Outcome(line, seconds, summary, release.publish))
    return line


def _run(
    corpus: Sequence[Path], collection: Collection, encoders: Encoders, options: BuildOptions, release: Release
) -> tuple[BuildSummary, int]:
    """Returns the finished build, and how many old versions were removed."""
    with collection.sole_builder():
        pass  # raises Busy before two runs load their encoders into one memory
    with ExitStack() as stack:
        encoder = encoders.load()
        if isinstance(encoder, DeviceEncoder):
            stack.callback(encoder.close)
        return _run_by(encoder, corpus, collection, encoders, options, release)


def _run_by(
    encoder: Encoder, corpus: Sequence[Path], collection: Collection, encoders: Encoders, options: BuildOptions,
    release: Release,
) -> tuple[BuildSummary, int]:  # fmt: skip
    # Everything that may not fit is checked before hours of work.
    if release.queries:
        options = replace(options, queries=tuple(load_queries(release.queries)))
    canaries = load_canaries(release.canaries) if release.canaries else kept_canaries(collection.root)
    asking = encoders.load_queries(encoder) if canaries or encoders.queries else encoder
    options = replace(options, query_encoder=asking, encoder_name=encoders.documents.absolute().name)
    query_encoders = admitted(collection, encoder, asking)
    if release.publish:
        documents = str(encoders.documents)
        collection.require_same_space(documents, encoder.spec.space, encoder.spec.dim, query_encoders)
    if not query_encoders:
        how = "name one with --query-encoder, or later: care index admit ENCODER_FOLDER"
        _warn(f"no query encoder may search this version yet; {how}")
    if cluster := encoders.cluster(encoder):
        options = replace(options, encode=cluster.encode)
    if isinstance(encoder, DeviceEncoder):
        options = replace(options, encode=encoder.encode_shards)
    _announce(collection, encoder)
    summary = build(corpus, encoder, collection, options)

    def queries(snapshot: Snapshot) -> Vectors:
        """Measures recall in a database by the same queries as that of an own index."""
        return recall_queries(asking, snapshot.documents, options.queries)

    try:
        if release.canaries:
            keep_canaries(collection.root, release.canaries)
        if release.publish and (served := _equal_served(collection, summary)):
            collection.discard(summary.version)
            rejects = collection.rejects / f"{served.version}.jsonl" if summary.rejects_file else None
            folder = collection.folder(served.version)
            summary = replace(summary, version=served.version, folder=folder, rejects_file=rejects, unchanged=True)
            if canaries:
                check_canaries(collection, served.version, asking, canaries)
        elif release.publish:
            _require_documents(summary, release.max_removed, collection.served_manifest())
            publish(collection, summary.version, Measure(queries, options.recall_floor), asking=lambda: asking)
        elif canaries:  # in the version's own index: only a publication uploads it to a database
            check_canaries(Collection(collection.root), summary.version, asking, canaries)
    finally:  # versions that fail week after week must not fill the disk
        removed = 0
        if release.keep is not None or release.keep_days is not None:
            with suppress(Busy):  # another run just began: it removes them
                removed = len(prune(collection, release.keep, release.keep_days))
    return summary, removed


def _equal_served(collection: Collection, summary: BuildSummary) -> Manifest | None:
    """The manifest of the served version if it is sound and equal to the new one."""
    served = collection.served_manifest()
    if served is None or not served.is_equal_to(Manifest.read(summary.folder)):
        return None
    with suppress(BadSnapshot):
        return verify(collection, served.version)
    return None


def _require_documents(summary: BuildSummary, most: float, served: Manifest | None) -> None:
    """Refuses a version that lacks too many of the corpus's documents, except those that the service deleted.

    Documents that were posted to the service are in every build, so they do not count as documents of the corpus.
    """
    changes = summary.changes
    missing = changes.removed - changes.withdrawn
    before = max(changes.before - (served.fresh.posted if served else 0), missing)
    if missing > most * before:
        raise Blocked(
            f"{summary.version} is built but not published: {missing} of the {before} served documents of the corpus "
            f"would vanish ({missing / before:.1%}; at most {most:.1%} may). If the corpus is right, give "
            f"--max-removed {math.ceil(1000 * missing / before) / 1000}; else mend the corpus and build again"
        )


def _announce(collection: Collection, encoder: Encoder) -> None:
    """Warns that everything will be encoded again, before hours are spent on it."""
    if (served := collection.served_manifest()) is None:
        return
    for version in collection.versions():
        with suppress(BadSnapshot):
            if Manifest.read(collection.folder(version)).encoder.fingerprint == encoder.fingerprint:
                return
    change = f"{served.encoder.fingerprint} made {served.version}, this one is {encoder.fingerprint}"
    _warn(f"another encoder ({change}): every passage is encoded again")


def _send(report: Report, collection: Collection, outcome: Outcome) -> None:
    if report.metrics_file:
        served = collection.served_manifest()
        write_metrics(report.metrics_file, outcome, time.time(), served.created.timestamp() if served else None)
    if report.webhook:
        call_webhook(report.webhook, outcome)


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
        write_to_textfile(str(path), registry)
    except OSError as error:
        _warn(f"the metrics could not be written to {path} ({error.strerror})")


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
            _warn(f"the webhook was not told ({error})")

    # In a thread that is left behind: urllib's timeout covers each read, not the whole call or name resolution.
    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(WEBHOOK_TIMEOUT_SECONDS)
    if thread.is_alive():
        _warn(f"the webhook has not answered within {WEBHOOK_TIMEOUT_SECONDS:g} s")


def _warn(message: str) -> None:
    print(f"care index: {message}", file=sys.stderr)

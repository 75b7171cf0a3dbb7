"""One run of the indexer as a schedule starts it: build, check, publish, remove old versions, report."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from indexer.build import BuildOptions, BuildSummary, admitted, build
from indexer.canary import check_canaries
from indexer.cluster import Cluster
from indexer.encode import Encoder
from indexer.errors import BadBuild, Blocked
from indexer.probe import load_queries
from indexer.publish import Measure, prune, publish, readable, served_manifest, verify
from indexer.recall import encode_queries, sample_queries
from indexer.report import Outcome, call_webhook, summary_line, write_metrics
from indexer.store.canaries import keep_canaries, kept_canaries, load_canaries
from indexer.store.collection import Collection
from indexer.store.errors import BadSnapshot, Busy
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import OnnxEncoder, Vectors
from models.encoder.spec import Precision, Side, Variant
from models.encoder.tokenizer import has_graph

# The share of the served documents that a new version may lack, unless told otherwise.
MAX_REMOVED = 0.2


@dataclass(frozen=True)
class Encoders:
    """Which folder reads documents and how, and which reads queries (None: the same).

    A folder is read by ONNX Runtime where it has a graph, else by torch; a precision asks for torch.
    `ray` is the address of the cluster that encodes the documents; None: this process does.
    """

    documents: Path
    variant: Variant | None = None
    queries: Path | None = None
    threads: int = 0
    device: str | None = None
    precision: Precision | None = None
    token_budget: int | None = None
    ray: str | None = None

    def load(self) -> Encoder:
        weights = any(self.documents.glob("*.safetensors"))
        by_torch = self.precision is not None or (weights and not has_graph(self.documents))
        if by_torch and self.variant is not None:
            raise BadBuild(f"--variant {self.variant}: {self.documents} is read by torch; leave it out, or --precision")
        if not by_torch:
            return OnnxEncoder.load(self.documents, self.variant, device=self.device or "cpu", threads=self.threads)
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
        """Whose nodes open what was opened here: the same path, the same options, but one thread unless told."""
        if self.ray is None:
            return None
        processors = self.threads or 1
        there = replace(self, documents=self.documents.absolute(), threads=processors)
        by_torch = isinstance(documents.variant, Precision)
        cards = self.device == "cuda" or (by_torch and self.device is None)
        cluster = Cluster(self.ray, there.load, processors, cards)
        cluster.require()
        return cluster

    def load_queries(self, documents: Encoder) -> Encoder:
        """The encoder of queries; refuses one that cannot be asked about these documents."""
        same = self.queries in (None, self.documents) and isinstance(documents, OnnxEncoder)
        encoder = documents if same or not self.queries else OnnxEncoder.load(self.queries, threads=self.threads)
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
    """What a version must pass, by files of queries, and what is done with it. None: not asked for.

    `queries` measure the recall of its index. `max_removed` is the share of the served documents that may be missing
    in it.
    """

    publish: bool = False
    max_removed: float = MAX_REMOVED
    queries: Path | None = None
    canaries: Path | None = None
    keep: int | None = None
    keep_days: float | None = None


@dataclass(frozen=True)
class Report:
    """Who is told how a run ended."""

    metrics_file: Path | None = None
    webhook: str | None = None


def reindex(
    corpus: Sequence[Path],
    collection: Collection,
    encoders: Encoders,
    options: BuildOptions,
    release: Release,
    report: Report,
) -> str:
    """One run; returns its line. Whatever it raises has been reported, but Busy: that run is another's to report."""
    started = time.monotonic()
    try:
        summary, removed = _run(corpus, collection, encoders, options, release)
    except Busy:
        raise
    except BaseException as error:  # a run that is told to stop is no success either
        _tell(report, collection, Outcome(_reason(error), time.monotonic() - started))
        raise
    seconds = time.monotonic() - started
    line = summary_line(summary, published=release.publish, removed=removed, seconds=seconds)
    _tell(report, collection, Outcome(line, seconds, summary, release.publish))
    return line


def _run(
    corpus: Sequence[Path], collection: Collection, encoders: Encoders, options: BuildOptions, release: Release
) -> tuple[BuildSummary, int]:
    """The finished build, and how many old versions were removed."""
    with collection.sole_builder():
        pass  # before a large encoder is opened beside that of another run, and fails for want of memory
    encoder = encoders.load()
    # Before the work, not after it: what is not there or does not fit should not cost a night.
    if release.queries:
        options = replace(options, queries=tuple(load_queries(release.queries)))
    canaries = load_canaries(release.canaries) if release.canaries else kept_canaries(collection.root)
    asking = encoders.load_queries(encoder) if canaries or encoders.queries else encoder
    options = replace(options, query_encoder=asking)
    query_encoders = admitted(collection, encoder, asking)
    if release.publish:
        documents = str(encoders.documents)
        collection.require_same_space(documents, encoder.spec.space, encoder.spec.dim, query_encoders)
    if not query_encoders:
        how = "name one with --query-encoder, or later: care index admit ENCODER_FOLDER"
        print(f"care index: no query encoder may search this version yet; {how}", file=sys.stderr)
    if cluster := encoders.cluster(encoder):
        options = replace(options, encode=cluster.encode)
    _announce(collection, encoder)
    summary = build(corpus, encoder, collection, options)
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
            _require_documents(summary, release.max_removed)
            measure = Measure(partial(_queries, asking, options), options.recall_floor)
            publish(collection, summary.version, measure, asking=lambda: asking)
        elif canaries:  # in the version's own index: only a publication puts it into a database
            check_canaries(Collection(collection.root), summary.version, asking, canaries)
    finally:  # versions that fail week after week must not fill the disk
        removed = _prune(collection, release)
    return summary, removed


def _equal_served(collection: Collection, summary: BuildSummary) -> Manifest | None:
    """The manifest of the served version if it is sound and the new one would replace it by the same."""
    served = served_manifest(collection)
    if served is None or not served.is_equal_to(Manifest.read(summary.folder)):
        return None
    try:
        verify(collection, served.version)
    except BadSnapshot:
        return None
    return served


def _require_documents(summary: BuildSummary, most: float) -> None:
    """Refuses a version that lacks too many of the served documents; those that the service withdrew do not count."""
    changes = summary.changes
    missing = changes.removed - changes.withdrawn
    if missing > most * changes.before:
        raise Blocked(
            f"{summary.version} is built but not published: {missing} of the {changes.before} served documents would "
            f"vanish ({missing / changes.before:.1%}; at most {most:.1%} may). If the corpus is right, give "
            f"--max-removed {math.ceil(1000 * missing / changes.before) / 1000}; else mend the corpus and build again"
        )


def _prune(collection: Collection, release: Release) -> int:
    if release.keep is None and release.keep_days is None:
        return 0
    with suppress(Busy):  # another run began at this very moment: it removes them
        return len(prune(collection, release.keep, release.keep_days))
    return 0


def _queries(encoder: Encoder, options: BuildOptions, snapshot: Snapshot) -> Vectors:
    """What the recall of an index in a database is measured by: as that of an index of ours."""
    return encode_queries(encoder, options.queries or sample_queries(snapshot.documents))


def _announce(collection: Collection, encoder: Encoder) -> None:
    """Says that everything will be encoded again, before hours are spent on it."""
    served = served_manifest(collection)
    if served and not any(own.encoder.fingerprint == encoder.fingerprint for own in readable(collection)):
        change = f"{served.encoder.fingerprint} made {served.version}, this one is {encoder.fingerprint}"
        print(f"care index: another encoder ({change}): every passage is encoded again", file=sys.stderr)


def _reason(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return "stopped before its end; the same command goes on"
    return " ".join(str(error).split()) or type(error).__name__


def _tell(report: Report, collection: Collection, outcome: Outcome) -> None:
    if report.metrics_file:
        served = served_manifest(collection)
        published_at = served.created.timestamp() if served else None
        write_metrics(report.metrics_file, outcome, time.time(), published_at)
    if report.webhook:
        call_webhook(report.webhook, outcome)

"""Runs one scheduled re-index: build, check, publish, remove old versions, report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from indexer.build import BuildOptions, BuildSummary, admitted, build
from indexer.checks import check_canaries, load_queries, recall_queries
from indexer.cluster import Cluster
from indexer.devices import DeviceEncoder, is_spread
from indexer.encode import Encoder
from indexer.errors import BadBuild, BadSnapshot, Blocked, Busy
from indexer.report import Outcome, Report, send, summary_line, warn
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
            packed = import_module("models.encoder.packed.joined")
        except ModuleNotFoundError as error:
            raise BadBuild(
                f"{self.documents} is read by torch, which is not here: install care-search[train]"
            ) from error
        options = {"device": self.device, "precision": self.precision, "token_budget": self.token_budget}
        encoder: Encoder = packed.open_packed(self.documents, threads=self.threads, **options)
        return encoder

    def cluster(self, documents: Encoder) -> Cluster | None:
        """Returns the cluster whose nodes open the same folder with the same options, by default with one thread."""
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
    except BaseException as error:  # a stopped run has failed too
        reason = " ".join(str(error).split()) or type(error).__name__
        line = reason if isinstance(error, Exception) else "stopped before its end; the same command goes on"
        send(report, collection, Outcome(line, time.monotonic() - started))
        raise
    seconds = time.monotonic() - started
    line = summary_line(summary, published=release.publish, removed=removed, seconds=seconds)
    send(report, collection, Outcome(line, seconds, summary, release.publish))
    return line


def _run(
    corpus: Sequence[Path], collection: Collection, encoders: Encoders, options: BuildOptions, release: Release
) -> tuple[BuildSummary, int]:
    """Returns the finished build, and how many old versions were removed."""
    with collection.sole_builder():
        pass  # raises Busy before two runs load their encoders into one memory
    encoder = encoders.load()
    with closing(encoder) if isinstance(encoder, DeviceEncoder) else nullcontext():
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
        warn(f"no query encoder may search this version yet; {how}")
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
                removed = len(prune(collection, release.keep or 1, release.keep_days))  # what was built stays
    return summary, removed


def _equal_served(collection: Collection, summary: BuildSummary) -> Manifest | None:
    """Returns the manifest of the served version if it is sound and equal to the new one."""
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
            f"--max-removed {math.ceil(1000 * missing / before) / 1000}; else correct the corpus and build again"
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
    warn(f"another encoder ({change}): every passage is encoded again")

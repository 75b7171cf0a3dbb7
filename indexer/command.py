"""Snapshots of a corpus: build one, check it, publish it, compare two, go back to an earlier one.

care index build examples/corpus.jsonl --publish --keep 4
care index list
care index rollback
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from indexer import arguments as options
from indexer.diff import compare_answers, compare_documents
from indexer.probe import load_queries
from indexer.publish import (
    Measure,
    VersionInfo,
    admit,
    choose,
    list_versions,
    newest,
    prune,
    publish,
    rollback,
    verify,
)
from indexer.recall import encode_queries, sample_queries
from indexer.reindex import reindex
from indexer.store import Collection, Snapshot
from indexer.store.documents import Documents
from indexer.store.kinds import LEAST_ROWS_FOR_LISTS
from indexer.suggest import SAMPLE_ROWS, measure_kinds, propose
from models.encoder.onnx import OnnxEncoder, Vectors

SHOWN = 10
DIFF_QUERIES = 50


def add_arguments(parser: ArgumentParser) -> None:
    names = "build|publish|admit|list|rollback|verify|diff|suggest|prune"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)
    options.add_build(actions.add_parser("build", help="read a corpus, encode what is new and write a new version"))
    options.add_publish(actions.add_parser("publish", help="serve a version: the newest, or the one named"))
    admitting = actions.add_parser("admit", help="let a further query encoder search a version")
    admitting.add_argument("encoder", type=Path, help="folder of the query encoder")
    admitting.add_argument("version", nargs="?", help="(default: the served one)")
    options.add_rollback(actions.add_parser("rollback", help="serve the version published before, or the one named"))
    checking = actions.add_parser("verify", help="open a version and compare every checksum")
    checking.add_argument("version", nargs="?")
    actions.add_parser("list", help="every version, oldest first")
    options.add_diff(actions.add_parser("diff", help="what changed between two versions: documents and answers"))
    options.add_suggest(actions.add_parser("suggest", help="which kind of index suits, by measuring on a sample"))
    options.add_keep(actions.add_parser("prune", help="remove old versions, and what unfinished builds have encoded"))
    for changing in ("build", "publish", "rollback", "prune"):
        options.add_vectors(actions.choices[changing])
    for action in actions.choices.values():
        options.add_collection(action)


def run(arguments: Namespace) -> None:
    collection = Collection(arguments.collection, getattr(arguments, "vectors", None))
    match arguments.action:
        case "build":
            how = options.build_options(arguments), options.release(arguments), options.report(arguments)
            print(reindex(arguments.corpus, collection, options.encoders(arguments), *how))
        case "publish":
            measure = Measure(partial(_queries, arguments.query_encoder), arguments.recall_floor)
            asking = partial(OnnxEncoder.load, arguments.query_encoder)
            move = publish(collection, arguments.version, measure, asking=asking, force=arguments.force)
            print(f"published {move.after}")
        case "admit":
            version = admit(collection, arguments.encoder, arguments.version)
            print(f"{arguments.encoder} may search {version}; a service that refused it opens it after a reload")
        case "rollback":
            asking = partial(OnnxEncoder.load, arguments.query_encoder)
            move = rollback(collection, arguments.version, asking=asking, force=arguments.force)
            print(f"rolled back from {move.before} to {move.after}")
        case "verify":
            manifest = verify(collection, arguments.version)
            counts = f"{manifest.counts.documents} documents, {len(manifest.files)} files"
            print(f"{manifest.version} is sound: {counts}, content {manifest.content[:16]}")
        case "list":
            lines = [_line(info) for info in list_versions(collection)]
            print("\n".join(lines) or f"{collection.root} has no version; care index build makes one")
        case "diff":
            for line in _diff(arguments, collection):
                print(line)
        case "suggest":
            for line in _suggest(arguments, collection):
                print(line)
        case "prune":
            removed = prune(collection, arguments.keep, arguments.keep_days, unfinished=True)
            print(f"removed {', '.join(removed) or 'no version'}")


def _queries(encoder: Path, snapshot: Snapshot) -> Vectors:
    """Vectors of queries that somebody might ask of the snapshot."""
    reading = OnnxEncoder.load(encoder)
    snapshot.manifest.require_encoder(reading.spec)
    return encode_queries(reading, sample_queries(snapshot.documents))


def _diff(arguments: Namespace, collection: Collection) -> Iterator[str]:
    after = arguments.new or newest(collection)
    old = Snapshot.open(collection.folder(arguments.old or _before(collection, after)))
    new = Snapshot.open(collection.folder(after))
    diff = compare_documents(old.documents, new.documents)
    yield f"{old.version} → {new.version}"
    yield f"added: {_ids(new.documents, diff.added.tolist())}"
    yield f"changed: {_ids(new.documents, diff.changed.tolist())}"
    yield f"removed: {_ids(old.documents, diff.removed.tolist())}"
    encoder = OnnxEncoder.load(arguments.query_encoder)
    for snapshot in (old, new):
        snapshot.manifest.require_encoder(encoder.spec)
    queries = load_queries(arguments.queries) if arguments.queries else sample_queries(old.documents, DIFF_QUERIES)
    answers = compare_answers(old, new, encoder, queries)
    yield f"answers: {len(answers)} of {len(queries)} queries have another top 10"
    for answer in answers[:SHOWN]:
        moves = [f"{name} {', '.join(ids)}" for name, ids in (("came", answer.came), ("went", answer.went)) if ids]
        yield f"  {answer.query}: {'; '.join(moves) or 'another order'}"


def _before(collection: Collection, version: str) -> str:
    """What a version is compared with unless told: the served one, or what that replaced where it is the served one."""
    served = choose(collection, None)
    return served if served != version else collection.previous() or served


def _suggest(arguments: Namespace, collection: Collection) -> Iterator[str]:
    snapshot = Snapshot.open(collection.folder(choose(collection, arguments.version)))
    queries = _queries(arguments.query_encoder, snapshot)
    passages = arguments.passages or len(snapshot.passages)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = arguments.memory_mb * 1_000_000 if arguments.memory_mb else machine
    measured = measure_kinds(snapshot.vectors.values, queries, passages, arguments.recall_floor)
    sample = min(len(snapshot.passages), SAMPLE_ROWS)
    yield f"measured on {sample} passages of {snapshot.version}, expected at {passages}:"
    yield "kind      recall@10  depth  ms here  ms expected  MB expected"
    for one in measured:
        recall = f"{one.recall:.3f}" if one.recall is not None else "too low"
        times = f"{one.sample_ms:7.2f}  {one.expected_ms:11.2f}"
        yield f"{one.kind:8}  {recall:>9}  {one.depth:5}  {times}  {one.expected_bytes / 1e6:11.0f}"
    if sample < LEAST_ROWS_FOR_LISTS:
        yield f"ivf-pq and rabitq are not measured: they want {LEAST_ROWS_FOR_LISTS} passages"
    yield f"--index {propose(measured, memory).kind}"


def _ids(documents: Documents, rows: list[int]) -> str:
    """How many, and the ids of the first few."""
    named = ", ".join(documents.get(row).id for row in rows[:SHOWN])
    more = ", …" if len(rows) > SHOWN else ""
    return f"{len(rows)} documents" + (f" ({named}{more})" if rows else "")


def _line(info: VersionInfo) -> str:
    mark = "*" if info.current else " "
    if info.problem is not None or info.created is None or info.size_bytes is None:
        return f"{mark} {info.version}  unreadable: {info.problem}"
    created = info.created.strftime("%Y-%m-%d %H:%M")
    return f"{mark} {info.version}  {created}  {info.documents:>8} documents  {info.size_bytes / 1e6:8.1f} MB"

"""Snapshots of a corpus: build one, check it, publish it, compare two, go back to an earlier one.

care index build examples/corpus.jsonl --publish --keep 4
care index list
care index rollback
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from indexer.build import BuildOptions
from indexer.checks import (
    FLOOR,
    SAMPLE_ROWS,
    compare_answers,
    compare_documents,
    load_queries,
    measure_kinds,
    propose,
    recall_queries,
    sample_queries,
)
from indexer.corpus import FieldMap
from indexer.devices import parse_devices
from indexer.errors import BadBuild, BadDatabase, BadSnapshot
from indexer.reindex import MAX_REMOVED, Encoders, Release, reindex
from indexer.report import Report
from indexer.store.collection import HERE, Collection, Database
from indexer.store.documents import Documents
from indexer.store.kinds import LEAST_ROWS_FOR_LISTS, IndexKind
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from indexer.versions import Measure, admit, choose, list_versions, prune, publish, rollback, verify
from models.encoder.address import load_encoder
from models.encoder.onnx import Vectors
from models.encoder.spec import Precision, Variant
from models.package import BUNDLED_ENCODER, positive, share, threads

COLLECTION = Path("var/collection")
EXAMPLE_CORPUS = Path(__file__).parent / "examples" / "corpus.jsonl"
VECTORS = "CARE_VECTORS"
READS = "CARE_ENCODER; %(default)s"
MAPPED = ("id", "title", "text", "metadata")
SHOWN = 10
DIFF_QUERIES = 50


def add_arguments(parser: ArgumentParser) -> None:
    names = "build|publish|admit|list|rollback|verify|diff|suggest|prune"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)
    _add_build(actions.add_parser("build", help="read a corpus, encode what is new and write a new version"))
    add = actions.add_parser("publish", help="serve a version: the newest, or the one named").add_argument
    add("version", nargs="?", type=_version)
    add("--force", action="store_true", help="even if canaries fail, or its space or dimension differs")
    add("--recall-floor", type=share, default=FLOOR, help="least recall@10 there (%(default)s)")
    add = actions.add_parser("admit", help="let a further query encoder search a version").add_argument
    add("encoder", type=Path, help="folder of the query encoder")
    add("version", nargs="?", type=_version, help="(default: the served one)")
    add = actions.add_parser("rollback", help="serve the version published before, or the one named").add_argument
    add("version", nargs="?", type=_version)
    add("--force", action="store_true", help="even if canaries fail")
    actions.add_parser("verify", help="open a version and compare every checksum").add_argument(
        "version", nargs="?", type=_version
    )
    actions.add_parser("list", help="every version, oldest first")
    add = actions.add_parser("diff", help="what changed between two versions: documents and answers").add_argument
    add("old", nargs="?", type=_version, help="version (default: the served one, or what it replaced)")
    add("new", nargs="?", type=_version, help="version (default: the newest)")
    add("--queries", type=Path, help='queries to compare, one {"text": …} a line (default: made up)')
    add = actions.add_parser("suggest", help="which kind of index suits, by measuring on a sample").add_argument
    add("version", nargs="?", type=_version, help="whose vectors are measured (default: the served one)")
    add("--passages", type=positive, help="size of the collection to come (default: the version's)")
    add("--memory-mb", type=positive, help="what the index may take (default: the machine's memory)")
    add("--recall-floor", type=share, default=FLOOR, help="least recall@10 (%(default)s)")
    _add_keep(actions.add_parser("prune", help="remove old versions, and what unfinished builds have encoded"))
    encoder = served_encoder() or BUNDLED_ENCODER
    for name, what in (
        ("publish", "folder that asks the collection's canaries and measures recall"),
        ("rollback", "folder that asks the collection's canaries"),
        ("diff", "folder that reads them"),
        ("suggest", "folder that reads queries"),
    ):
        actions.choices[name].add_argument("--query-encoder", type=Path, default=encoder, help=f"{what} ({READS})")
    vectors = f"{HERE}, or the database that searches, as qdrant+http://host:6333/alias ({VECTORS}; %(default)s)"
    for name in ("build", "publish", "rollback", "prune"):  # what changes the published version: a database follows
        default = os.environ.get(VECTORS) or HERE
        actions.choices[name].add_argument("--vectors", type=_database, default=default, metavar="WHERE", help=vectors)
    folder = Path(os.environ.get("CARE_COLLECTION") or COLLECTION)
    for action in actions.choices.values():
        text = "collection folder (CARE_COLLECTION; %(default)s)"
        action.add_argument("--collection", type=Path, default=folder, help=text)


def _add_build(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", type=Path, nargs="+", help="JSON lines (.gz too), Parquet or CSV files, or a folder")
    add("--encoder", type=Path, default=served_encoder() or BUNDLED_ENCODER, help=f"document encoder folder ({READS})")
    add("--variant", type=Variant, choices=list(Variant), help="which graph of the encoder")
    add("--device", help="cpu, cuda, several as cuda:0,cuda:1, or all GPUs (default: ONNX cpu; torch the GPU, if any)")
    add("--precision", type=Precision, choices=list(Precision),
        help="numbers of an encoder that torch runs (default: bf16 on a GPU, else fp32)")  # fmt: skip
    add("--token-budget", type=positive, help="tokens that torch takes at a time (default: by device)")
    add("--index", type=IndexKind, choices=list(IndexKind), help="kind of index (default: by size, flat or hnsw)")
    add("--recall-floor", type=share, default=FLOOR, help="least recall@10 of the index (%(default)s)")
    add("--queries", type=Path, help='what recall is measured by, one {"text": …} a line (default: made up)')
    add("--field", action="append", default=[], metavar="id=NAME",
        help="a column that is named otherwise: id=, title=, text= or metadata=")  # fmt: skip
    add("--metadata-field", action="append", default=[], help="a further column that is metadata")
    add(
        "--number-field",
        action="append",
        default=[],
        help="a further column, or a key of the metadata, to read as numbers (CSV)",
    )
    add("--passage-tokens", type=positive, help="tokens of a passage (default: all the encoder reads)")
    add("--overlap", type=int, help="tokens that neighbours share (64, at most a quarter of a passage)")
    add("--skip-bad", action="store_true", help="set bad rows aside in a file instead of stopping")
    add("--threads", type=threads, help="threads of encoder and index build (default: all cores)")
    add("--shard", type=positive, help="texts that a killed build may lose (default: 1024 by ONNX, 8192 on a GPU)")
    add("--shards", metavar="PLACE", help="folder or s3://… for unfinished work (default: in the collection)")
    add("--ray", metavar="ADDRESS", help="encode on a Ray cluster: local, auto or HOST:PORT")
    add("--publish", action="store_true", help="serve the new version at once, if it passes every check")
    add("--max-removed", type=share, default=MAX_REMOVED,
        help="publish only if at most this share of the served documents is missing (%(default)s)")  # fmt: skip
    add("--canaries", type=Path, help='queries that must find documents: {"query": …, "must": [ids], "within": 10}')
    add("--query-encoder", type=Path, default=served_encoder(),
        help="folder that is served: reads canaries and posted documents (CARE_ENCODER; else --encoder)")  # fmt: skip
    _add_keep(parser)
    add("--metrics-file", type=Path, help="a .prom file for Prometheus's textfile collector")
    add("--webhook", type=_url, help="address that receives the result of the run (JSON by POST)")


def _add_keep(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", type=positive, help="remove all but this many versions; never the last two published")
    parser.add_argument("--keep-days", type=_days, help="but none that is younger than this many days")


def served_encoder() -> Path | None:
    """Returns the query encoder that `care serve` reads from the environment; None if that is the bundled one."""
    named = os.environ.get("CARE_ENCODER")
    return Path(named) if named else None


def run(arguments: Namespace) -> None:
    collection = Collection(arguments.collection, getattr(arguments, "vectors", None))
    match arguments.action:
        case "build":
            print(_build(arguments, collection))
        case "publish":
            measure = Measure(partial(_queries, arguments.query_encoder), arguments.recall_floor)
            asking = partial(load_encoder, arguments.query_encoder)
            print(f"published {publish(collection, arguments.version, measure, asking=asking, force=arguments.force)}")
        case "admit":
            version = admit(collection, arguments.encoder, arguments.version)
            print(f"{arguments.encoder} may search {version}; a service that refused it opens it after a reload")
        case "rollback":
            asking, before = partial(load_encoder, arguments.query_encoder), collection.current()
            after = rollback(collection, arguments.version, asking=asking, force=arguments.force)
            print(f"rolled back from {before} to {after}")
        case "verify":
            manifest = verify(collection, arguments.version)
            counts = f"{manifest.counts.documents} documents, {len(manifest.files)} files"
            print(f"{manifest.version} is sound: {counts}, content {manifest.content[:16]}")
        case "list":
            lines = [_line(*each, collection.current()) for each in list_versions(collection).items()]
            print("\n".join(lines) or f"{collection.root} has no version; care index build makes one")
        case "diff" | "suggest":
            for line in (_diff if arguments.action == "diff" else _suggest)(arguments, collection):
                print(line)
        case "prune":
            removed = prune(collection, arguments.keep, arguments.keep_days, unfinished=True)
            print(f"removed {', '.join(removed) or 'no version'}")


def _build(arguments: Namespace, collection: Collection) -> str:
    def take(*names: str) -> dict[str, Any]:
        return {name: getattr(arguments, name) for name in names}

    options = BuildOptions(
        fields=field_map(arguments.field, arguments.metadata_field, arguments.number_field),
        # If a database searches, an own index would be useless.
        index=arguments.index or (IndexKind.FLAT if arguments.vectors else None),
        shard_texts=arguments.shard,
        **take("skip_bad", "passage_tokens", "overlap", "recall_floor", "shards", "threads"),
    )
    encoders = Encoders(
        arguments.encoder,
        queries=arguments.query_encoder,
        threads=arguments.threads or 0,
        devices=parse_devices(arguments.device) if arguments.device else (),
        **take("variant", "precision", "token_budget", "ray"),
    )
    release = Release(**take("publish", "max_removed", "queries", "canaries", "keep", "keep_days"))
    return reindex(arguments.corpus, collection, encoders, options, release, Report(**take("metrics_file", "webhook")))


def field_map(fields: list[str], metadata_fields: list[str], number_fields: list[str]) -> FieldMap:
    """Parses `id=doc_id` and the like."""
    names: dict[str, str] = {}
    for text in fields:
        field, separator, column = text.partition("=")
        if not separator or not column or field not in MAPPED:
            raise BadBuild(f"--field {text}: write one of {', '.join(f'{name}=NAME' for name in MAPPED)}")
        names[field] = column
    return FieldMap(**names, metadata_fields=tuple(metadata_fields), number_fields=tuple(number_fields))


def _queries(encoder: Path, snapshot: Snapshot) -> Vectors:
    """Returns vectors of queries made of the snapshot's documents."""
    reading = load_encoder(encoder)
    snapshot.manifest.require_encoder(reading.spec)
    return recall_queries(reading, snapshot.documents)


def _diff(arguments: Namespace, collection: Collection) -> Iterator[str]:
    after = arguments.new or collection.newest()
    before = arguments.old or choose(collection, None)
    if not arguments.old and before == after:  # the served version is compared with what it replaced
        before = collection.previous() or before
    old, new = Snapshot.open(collection.folder(before)), Snapshot.open(collection.folder(after))
    diff = compare_documents(old.documents, new.documents)
    yield f"{old.version} → {new.version}"
    yield f"added: {_ids(new.documents, diff.added.tolist())}"
    yield f"changed: {_ids(new.documents, diff.changed.tolist())}"
    yield f"removed: {_ids(old.documents, diff.removed.tolist())}"
    encoder = load_encoder(arguments.query_encoder)
    for snapshot in (old, new):
        snapshot.manifest.require_encoder(encoder.spec)
    queries = load_queries(arguments.queries) if arguments.queries else sample_queries(old.documents, DIFF_QUERIES)
    answers = compare_answers(old, new, encoder, queries)
    yield f"answers: {len(answers)} of {len(queries)} queries have another top 10"
    for answer in answers[:SHOWN]:
        moves = [f"{name} {', '.join(ids)}" for name, ids in (("came", answer.came), ("went", answer.went)) if ids]
        yield f"  {answer.query}: {'; '.join(moves) or 'another order'}"


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
        yield f"ivf-pq and rabitq are not measured: they need {LEAST_ROWS_FOR_LISTS} passages"
    yield f"--index {propose(measured, memory).kind}"


def _ids(documents: Documents, rows: list[int]) -> str:
    """Formats the number of documents and the ids of the first few."""
    named = ", ".join(documents.get(row).id for row in rows[:SHOWN])
    more = ", …" if len(rows) > SHOWN else ""
    return f"{len(rows)} documents" + (f" ({named}{more})" if rows else "")


def _line(version: str, made: Manifest | BadSnapshot, served: str | None) -> str:
    mark = "*" if version == served else " "
    if isinstance(made, BadSnapshot):
        return f"{mark} {version}  unreadable: {made}"
    created, documents = made.created.strftime("%Y-%m-%d %H:%M"), made.counts.documents
    return f"{mark} {version}  {created}  {documents:>8} documents  {made.size_bytes / 1e6:8.1f} MB"


def _version(text: str) -> str:
    if not text:  # an unset variable of a script must not publish the newest
        raise ArgumentTypeError("the version is empty; name one, or leave it out")
    return text


def _database(text: str) -> Database | None:
    try:
        return Database.parse(text, os.environ.get(f"{VECTORS}_KEY"))
    except BadDatabase as error:
        raise ArgumentTypeError(str(error)) from error


def _days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100_000:
        raise ArgumentTypeError(f"{text!r} is not a number of days")
    return value


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"{text!r} is not an address that begins with http:// or https://")
    return text

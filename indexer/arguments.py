"""The options of `care index`, and what they say as values of the indexer."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from indexer.build import BuildOptions
from indexer.corpus import FieldMap
from indexer.errors import BadBuild
from indexer.recall import FLOOR
from indexer.reindex import MAX_REMOVED, Encoders, Release, Report
from indexer.store import IndexKind
from indexer.store.database import HERE, Database
from indexer.store.errors import BadDatabase
from models.encoder.spec import Precision, Variant
from models.package import BUNDLED_ENCODER, positive, share

COLLECTION = Path("var/collection")
EXAMPLE_CORPUS = Path(__file__).parent / "examples" / "corpus.jsonl"
VECTORS = "CARE_VECTORS"
READS = "CARE_ENCODER; %(default)s"
MAPPED = ("id", "title", "text", "metadata")


def add_build(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", type=Path, nargs="+", help="JSON lines (.gz too), Parquet or CSV files, or a folder")
    add("--encoder", type=Path, default=served_encoder() or BUNDLED_ENCODER, help=f"document encoder folder ({READS})")
    add("--variant", type=Variant, choices=list(Variant), help="which graph of the encoder")
    add("--device", choices=("cpu", "cuda"), help="where it runs (default: ONNX graphs cpu; torch the card, if any)")
    add("--precision", type=Precision, choices=list(Precision),
        help="numbers of an encoder that torch runs, Qwen2 or Qwen3 (default: bf16 on a card, else fp32)")  # fmt: skip
    add("--token-budget", type=positive, help="tokens that torch takes at a time (default: by device)")
    add("--index", type=IndexKind, choices=list(IndexKind), help="kind of index (default: by size, flat or hnsw)")
    add("--recall-floor", type=share, default=FLOOR, help="least recall@10 of the index (%(default)s)")
    add("--queries", type=Path, help='what recall is measured by, one {"text": …} a line (default: made up)')
    add("--field", action="append", default=[], metavar="id=NAME",
        help="a column that is named otherwise: id=, title=, text= or metadata=")  # fmt: skip
    add("--metadata-field", action="append", default=[], help="a further column that is metadata")
    add("--number-field", action="append", default=[], help="metadata to read as numbers (CSV)")
    add("--passage-tokens", type=positive, help="tokens of a passage (default: all the encoder reads)")
    add("--overlap", type=int, default=64, help="tokens that neighbours share (%(default)s)")
    add("--skip-bad", action="store_true", help="set bad rows aside in a file instead of stopping")
    add("--threads", type=positive, help="threads of encoder and index build (default: all cores)")
    add("--shard", type=positive, help="texts that a killed build may lose (default: 1024 by ONNX, 8192 on a card)")
    add("--shards", metavar="PLACE", help="folder or s3://… for unfinished work (default: in the collection)")
    add("--ray", metavar="ADDRESS", help="encode on a Ray cluster: local, auto or HOST:PORT")
    add("--publish", action="store_true", help="serve the new version at once, if it passes every check")
    add("--max-removed", type=share, default=MAX_REMOVED,
        help="publish only if at most this share of the served documents is missing (%(default)s)")  # fmt: skip
    add("--canaries", type=Path, help='queries that must find documents: {"query": …, "must": [ids], "within": 10}')
    add("--query-encoder", type=Path, default=served_encoder(),
        help="folder that is served: reads canaries and posted documents (CARE_ENCODER; else --encoder)")  # fmt: skip
    add_keep(parser)
    add("--metrics-file", type=Path, help="a .prom file for Prometheus's textfile collector")
    add("--webhook", type=_url, help="address that is told how the run ended (JSON by POST)")


def add_collection(parser: ArgumentParser) -> None:
    here = Path(os.environ.get("CARE_COLLECTION") or COLLECTION)
    parser.add_argument(
        "--collection", type=Path, default=here, help="collection folder (CARE_COLLECTION; %(default)s)"
    )


def served_encoder() -> Path | None:
    """The query encoder that `care serve` reads from the environment; None if that is the bundled one."""
    named = os.environ.get("CARE_ENCODER")
    return Path(named) if named else None


def _add_query_encoder(parser: ArgumentParser, what: str) -> None:
    encoder = served_encoder() or BUNDLED_ENCODER
    parser.add_argument("--query-encoder", type=Path, default=encoder, help=f"{what} ({READS})")


def add_publish(parser: ArgumentParser) -> None:
    parser.add_argument("version", nargs="?")
    parser.add_argument("--force", action="store_true", help="even if canaries fail, or its space or dimension differs")
    parser.add_argument("--recall-floor", type=share, default=FLOOR, help="least recall@10 there (%(default)s)")
    _add_query_encoder(parser, "folder that asks the collection's canaries and measures recall")


def add_rollback(parser: ArgumentParser) -> None:
    parser.add_argument("version", nargs="?")
    parser.add_argument("--force", action="store_true", help="even if canaries fail")
    _add_query_encoder(parser, "folder that asks the collection's canaries")


def add_vectors(parser: ArgumentParser) -> None:
    """For everything that changes what is published: a database must follow."""
    here = os.environ.get(VECTORS) or HERE
    text = f"{HERE}, or the database that searches, as qdrant+http://host:6333/alias ({VECTORS}; %(default)s)"
    parser.add_argument("--vectors", type=_database, default=here, metavar="WHERE", help=text)


def add_keep(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", type=positive, help="remove versions beyond so many; never the last two published")
    parser.add_argument("--keep-days", type=_days, help="but none that is younger than so many days")


def add_diff(parser: ArgumentParser) -> None:
    parser.add_argument("old", nargs="?", help="version (default: the served one, or what it replaced)")
    parser.add_argument("new", nargs="?", help="version (default: the newest)")
    parser.add_argument("--queries", type=Path, help='queries to compare, one {"text": …} a line (default: made up)')
    _add_query_encoder(parser, "folder that reads them")


def add_suggest(parser: ArgumentParser) -> None:
    parser.add_argument("version", nargs="?", help="whose vectors are measured (default: the served one)")
    parser.add_argument("--passages", type=positive, help="size of the collection to come (default: the version's)")
    parser.add_argument("--memory-mb", type=positive, help="what the index may take (default: the machine's memory)")
    parser.add_argument("--recall-floor", type=share, default=FLOOR, help="least recall@10 (%(default)s)")
    _add_query_encoder(parser, "folder that reads queries")


def build_options(arguments: Namespace) -> BuildOptions:
    return BuildOptions(
        fields=field_map(arguments.field, arguments.metadata_field, arguments.number_field),
        skip_bad=arguments.skip_bad,
        passage_tokens=arguments.passage_tokens,
        overlap=arguments.overlap,
        # Where a database searches, an index of ours would be built for nobody.
        index=arguments.index or (IndexKind.FLAT if arguments.vectors else None),
        recall_floor=arguments.recall_floor,
        shard_texts=arguments.shard,
        shards=arguments.shards,
        threads=arguments.threads,
    )


def encoders(arguments: Namespace) -> Encoders:
    return Encoders(
        documents=arguments.encoder,
        variant=arguments.variant,
        queries=arguments.query_encoder,
        threads=arguments.threads or 0,
        device=arguments.device,
        precision=arguments.precision,
        token_budget=arguments.token_budget,
        ray=arguments.ray,
    )


def release(arguments: Namespace) -> Release:
    return Release(
        arguments.publish,
        arguments.max_removed,
        arguments.queries,
        arguments.canaries,
        arguments.keep,
        arguments.keep_days,
    )


def report(arguments: Namespace) -> Report:
    return Report(arguments.metrics_file, arguments.webhook)


def field_map(fields: list[str], metadata_fields: list[str], number_fields: list[str]) -> FieldMap:
    """`id=doc_id` and the like as a FieldMap."""
    names: dict[str, str] = {}
    for text in fields:
        field, separator, column = text.partition("=")
        if not separator or not column or field not in MAPPED:
            raise BadBuild(f"--field {text}: write one of {', '.join(f'{name}=NAME' for name in MAPPED)}")
        names[field] = column
    return FieldMap(**names, metadata_fields=tuple(metadata_fields), number_fields=tuple(number_fields))


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

"""Snapshots of a corpus: build one, publish it, list them, go back to an earlier one, verify one.

care index build examples/corpus.jsonl --publish
care index list
care index rollback
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from indexer.build import BuildOptions, build
from indexer.corpus import FieldMap
from indexer.errors import BadBuild
from indexer.publish import VersionInfo, list_versions, publish, rollback, verify
from indexer.store import Collection, IndexKind
from models.onnx_encoder import OnnxEncoder
from models.spec import Variant

ENCODER = Path("models/pretrained/care-small-zh")
COLLECTION = Path("var/collection")
MAPPED = ("id", "title", "text", "metadata")


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|publish|list|rollback|verify")
    making = actions.add_parser("build", help="read a corpus, encode it and write a new version")
    making.add_argument("corpus", type=Path, nargs="+", help="JSON lines (.gz too), Parquet or CSV files, or a folder")
    making.add_argument("--encoder", type=Path, default=ENCODER, help="document encoder folder (%(default)s)")
    making.add_argument("--variant", type=Variant, choices=list(Variant), help="which graph of the encoder")
    making.add_argument("--index", type=IndexKind, choices=list(IndexKind), help="flat or hnsw (default: by size)")
    making.add_argument("--field", action="append", default=[], metavar="id=NAME",
                        help="a column that is named otherwise: id=, title=, text= or metadata=")  # fmt: skip
    making.add_argument("--metadata-field", action="append", default=[], help="a further column that is metadata")
    making.add_argument("--number-field", action="append", default=[], help="metadata to read as numbers (CSV)")
    making.add_argument("--passage-tokens", type=_positive, help="tokens of a passage (default: all the encoder reads)")
    making.add_argument("--overlap", type=int, default=64, help="tokens that neighbours share (%(default)s)")
    making.add_argument("--skip-bad", action="store_true", help="set bad rows aside in a file instead of stopping")
    making.add_argument("--threads", type=_positive, help="threads of encoder and index build (default: all cores)")
    making.add_argument("--publish", action="store_true", help="serve the new version at once")
    publishing = actions.add_parser("publish", help="serve a version: the newest, or the one named")
    publishing.add_argument("version", nargs="?")
    publishing.add_argument("--force", action="store_true", help="even if its space or dimension differs")
    going_back = actions.add_parser("rollback", help="serve the version published before, or the one named")
    going_back.add_argument("version", nargs="?")
    checking = actions.add_parser("verify", help="open a version and compare every checksum")
    checking.add_argument("version", nargs="?")
    listing = actions.add_parser("list", help="every version, oldest first")
    for action in (making, publishing, going_back, checking, listing):
        action.add_argument("--collection", type=Path, default=COLLECTION, help="collection folder (%(default)s)")


def run(arguments: Namespace) -> None:
    collection = Collection(arguments.collection)
    match arguments.action:
        case "build":
            _build(arguments, collection)
        case "publish":
            print(f"published {publish(collection, arguments.version, force=arguments.force).after}")
        case "rollback":
            move = rollback(collection, arguments.version)
            print(f"rolled back from {move.before} to {move.after}")
        case "verify":
            manifest = verify(collection, arguments.version)
            print(f"{manifest.version} is sound: {manifest.counts.documents} documents, {len(manifest.files)} files")
        case "list":
            versions = list_versions(collection)
            for info in versions:
                print(_line(info))
            if not versions:
                print(f"{collection.root} has no version; care index build makes one")


def _build(arguments: Namespace, collection: Collection) -> None:
    options = BuildOptions(
        fields=field_map(arguments.field, arguments.metadata_field, arguments.number_field),
        skip_bad=arguments.skip_bad,
        passage_tokens=arguments.passage_tokens,
        overlap=arguments.overlap,
        index=arguments.index,
        threads=arguments.threads,
    )
    encoder = OnnxEncoder.load(arguments.encoder, arguments.variant, threads=arguments.threads or 0)
    summary = build(arguments.corpus, encoder, collection, options)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in summary.seconds.items())
    counts = summary.counts
    print(f"built {summary.version}: {counts.documents} documents, {counts.passages} passages, {summary.index} index")
    print(f"seconds: {seconds}")
    if summary.rejects_file:
        print(f"{counts.rejects} bad rows were set aside in {summary.rejects_file}")
    if arguments.publish:
        print(f"published {publish(collection, summary.version).after}")


def field_map(fields: list[str], metadata_fields: list[str], number_fields: list[str]) -> FieldMap:
    """`id=doc_id` and the like as a FieldMap."""
    names: dict[str, str] = {}
    for text in fields:
        field, separator, column = text.partition("=")
        if not separator or not column or field not in MAPPED:
            raise BadBuild(f"--field {text}: write one of {', '.join(f'{name}=NAME' for name in MAPPED)}")
        names[field] = column
    return FieldMap(**names, metadata_fields=tuple(metadata_fields), number_fields=tuple(number_fields))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _line(info: VersionInfo) -> str:
    mark = "*" if info.current else " "
    if info.problem is not None or info.created is None or info.size_bytes is None:
        return f"{mark} {info.version}  unreadable: {info.problem}"
    created = info.created.strftime("%Y-%m-%d %H:%M")
    return f"{mark} {info.version}  {created}  {info.documents:>8} documents  {info.size_bytes / 1e6:8.1f} MB"

"""Builds a snapshot from a corpus: read, cut, encode what is new, index, check, write. Publishes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

from indexer.checks import FLOOR, Changes, changes_since_published, choose_depth, recall_queries
from indexer.corpus import Document, FieldMap, Rejects, read_corpus
from indexer.encode import Encoder, EncodeShards, Work, checked, chunked, content_hashes, embed, encode_here
from indexer.errors import BadBuild
from indexer.log_changes import LogChanges
from indexer.passages import Budget, Cutter, passage_texts
from indexer.store.arrays import Array, Rows
from indexer.store.collection import Collection
from indexer.store.documents import Documents
from indexer.store.files import DiskDict
from indexer.store.kinds import FLAT_PASSAGES, IndexKind
from indexer.store.manifest import (
    CORRECTION_FILE,
    Built,
    Corrected,
    Counts,
    DocumentEncoder,
    Included,
    Manifest,
    Recall,
)
from indexer.store.shards import Shards, open_shards
from indexer.store.vectors import GpuGraph, VectorIndex, limit_threads
from indexer.store.writer import SnapshotWriter
from models.correction import SAMPLE, names_of, sample_rows
from models.encoder.spec import Side
from models.package import care_version
from models.progress import Progress

READ_CHUNK = 512
BAR_TEXTS = 32


@dataclass(frozen=True)
class BuildOptions:
    """How to build. None: the build chooses, by the encoder or the corpus's size.

    `queries` measure the recall of the index; none: some are made of the documents. `query_encoder` is served with the
    snapshot, and reads fresh documents; None: the same encoder. `shards` is the folder or address of unfinished work
    (None: in the collection), `encode` what encodes it. `encoder_name` is how people know the document encoder.
    """

    fields: FieldMap = field(default_factory=FieldMap)
    skip_bad: bool = False
    passage_tokens: int | None = None
    overlap: int | None = None
    index: IndexKind | None = None
    recall_floor: float = FLOOR
    queries: tuple[str, ...] = ()
    query_encoder: Encoder | None = None
    shard_texts: int | None = None
    shards: str | None = None
    encode: EncodeShards = encode_here
    threads: int | None = None
    encoder_name: str = ""


@dataclass(frozen=True)
class BuildSummary:
    """The result of a build.

    `changes` compares with the published version. `encoded` texts were encoded, `reused` passages had a known vector;
    other passages repeat a text that was encoded. `recall` is None for an exact index, `rejects_file` without bad rows.
    `posted` documents are in no corpus, `ignored` are columns that no option names. `unchanged`: the served version
    holds the same, so the new one was dropped, and `version` is the served one.
    """

    version: str
    folder: Path
    counts: Counts
    changes: Changes
    encoded: int
    reused: int
    index: IndexKind
    recall: Recall | None
    rejects_file: Path | None
    seconds: dict[str, float]
    posted: int = 0
    ignored: tuple[str, ...] = ()
    unchanged: bool = False

    def status(self, *, published: bool) -> str:
        return "unchanged" if self.unchanged else "published" if published else "built"


def build(
    corpus: Sequence[Path], encoder: Encoder, collection: Collection, options: BuildOptions | None = None
) -> BuildSummary:
    """Builds the next version of the collection from corpus files or folders; publishes nothing.

    Raises Busy if another process builds there. Called again, it continues a build that was killed.
    """
    options = options or BuildOptions()
    if Side.DOCUMENT not in encoder.spec.sides:
        raise BadBuild(
            f"the encoder of space {encoder.spec.space} reads queries only; name its document encoder with --encoder"
        )
    if (tokens := options.passage_tokens or 0) > encoder.spec.max_length:
        raise BadBuild(f"passages of {tokens} tokens: the encoder reads at most {encoder.spec.max_length}")
    if options.threads is not None:
        limit_threads(options.threads)
    with collection.sole_builder():
        # Several collections may share a place: each has a folder of its own, removed at the end.
        name = f"{collection.identity()}/{encoder.fingerprint}" if options.shards else encoder.fingerprint
        place = open_shards(options.shards, name, collection.shards(encoder.fingerprint))
        summary = _build_version(corpus, encoder, collection, options, place)
        place.clear()  # the version holds all that was encoded
        collection.prune_log()
    return summary


def _build_version(
    corpus: Sequence[Path], encoder: Encoder, collection: Collection, options: BuildOptions, place: Shards
) -> BuildSummary:
    version, created, spec = collection.next_version(), datetime.now(UTC), encoder.spec
    budget = Budget.of(options.passage_tokens or spec.max_length, options.overlap)
    cutter = Cutter(encoder.tokenizer, spec.document_instruction, budget)
    asking = options.query_encoder or encoder
    log = LogChanges.read(collection)
    columns: set[str] = set()
    seconds: dict[str, float] = {}
    rejects = Rejects(collection.rejects / f"{version}.jsonl" if options.skip_bad else None)
    with collection.building(version) as folder, SnapshotWriter(folder) as writer:
        with _timed("read", seconds), rejects, closing(DiskDict(folder / "ids")) as ids:
            kept = _read(read_corpus(corpus, options.fields, rejects, ids, log, columns), encoder, cutter, writer)
            documents, passages, hashes = writer.close_documents()
            log.write_withdrawn(folder)
        texts = partial(passage_texts, documents, passages)
        with _timed("encode", seconds):

            def composed(rows: Rows) -> Iterator[str]:
                """Returns what the encoder reads of the passages in `rows`."""
                return (cutter.compose(title, text) for title, text in texts(rows))

            work = Work(place, options.shard_texts or encoder.bulk_texts, options.encode)
            reuse, encoded, reused = embed(hashes, composed, encoder, collection, work)
            vectors = writer.write_vectors(reuse.vectors(), spec.dim)
            correction = _read_sample(writer, len(vectors), encoder, composed, asking)
        with _timed("index", seconds):
            indexed = _index(writer, folder, vectors, asking, documents, options)
        with _timed("lexical", seconds):
            every = Progress("words", "documents", len(documents)).over(map(documents.get, range(len(documents))))
            writer.write_lexical((f"{each.title}\n{each.text}" for each in every), passages.first_rows())
        with _timed("write", seconds):
            kind, parameters, depth, recall = indexed
            manifest = writer.finish(
                Manifest(
                    version=version,
                    space=spec.space,
                    encoder=DocumentEncoder(
                        fingerprint=encoder.fingerprint, variant=encoder.variant, name=options.encoder_name
                    ),
                    dim=spec.dim,
                    counts=Counts(documents=len(documents), passages=len(passages), rejects=rejects.count),
                    built=Built(
                        index=kind,
                        index_parameters=parameters,
                        search_depth=depth,
                        recall=recall,
                        passage_tokens=budget.tokens,
                        passage_overlap=budget.overlap,
                        care_version=care_version(),
                        created=created,
                    ),
                    fresh=Included(position=log.position, posted=kept),
                    correction=correction,
                    query_encoders=admitted(collection, encoder, asking),
                )
            )
        changes = changes_since_published(collection, documents, log.deleted)
    return BuildSummary(
        version=version,
        folder=collection.folder(version),
        counts=manifest.counts,
        changes=changes,
        encoded=encoded,
        reused=reused,
        index=kind,
        recall=recall,
        rejects_file=rejects.path if rejects.count else None,
        ignored=tuple(sorted(columns - options.fields.used_names() - {""})),  # a trailing comma in CSV
        posted=kept,
        seconds=seconds,
    )


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Shows a stage and stores its duration."""
    start = time.perf_counter()
    with Progress(name):
        yield
    seconds[name] = time.perf_counter() - start


def _read(corpus: Iterable[Document], encoder: Encoder, cutter: Cutter, writer: SnapshotWriter) -> int:
    """Cuts documents and writes them with their passages' content hashes; returns how many are in no corpus."""
    kept = 0
    with Progress("read", "documents") as bar:
        for documents in chunked(corpus, READ_CHUNK):
            cuts = cutter.cut([d.title for d in documents], [d.text for d in documents])
            for document, spans in zip(documents, cuts, strict=True):
                texts = [cutter.compose(document.title, document.text[start:end]) for start, end in spans]
                hashes = content_hashes(texts, encoder)
                writer.add(document.id, document.title, document.text, document.metadata, spans, hashes)
                kept += document.kept
            bar.update(len(documents))
    return kept


def admitted(collection: Collection, encoder: Encoder, asking: Encoder) -> tuple[str, ...]:
    """Identities of the query encoders that may search a new version: these, and those of the served one.

    The latter count if the same document encoder made it.
    """
    served = collection.served_manifest()
    before = served.query_encoders if served and served.encoder.fingerprint == encoder.fingerprint else ()
    here = (each.spec.identities for each in (encoder, asking) if Side.QUERY in each.spec.sides)
    return tuple(sorted({*before, *chain.from_iterable(here)}))


def _read_sample(
    writer: SnapshotWriter, passages: int, encoder: Encoder, composed: Callable[[Rows], Iterator[str]], asking: Encoder
) -> Corrected | None:
    """Encodes some passages by the query encoder, which will read fresh documents; None if it is the same encoder."""
    if encoder.fingerprint in names_of(asking):
        return None
    rows, side = sample_rows(passages, SAMPLE), asking.spec.document_side
    texts = Progress("read by the query encoder", "passages", len(rows)).over(composed(rows))
    # In small parts, to move the progress bar: a large encoder takes minutes on a CPU.
    parts = (checked(asking.encode(some, side), "query encoder") for some in chunked(texts, BAR_TEXTS))
    writer.write_vectors(parts, encoder.spec.dim, CORRECTION_FILE)
    return Corrected(encoders=tuple(sorted(names_of(asking))), passages=len(rows))


def _index(
    writer: SnapshotWriter, folder: Path, vectors: Array, asking: Encoder, documents: Documents, options: BuildOptions
) -> tuple[IndexKind, dict[str, int], int, Recall | None]:
    """Builds the index and measures how deep it must be searched; returns its kind, parameters, depth and recall."""
    kind = options.index or (IndexKind.FLAT if len(vectors) <= FLAT_PASSAGES else IndexKind.HNSW)
    parameters = writer.write_index(vectors, kind)
    if kind is IndexKind.FLAT:
        return kind, parameters, 0, None
    queries = recall_queries(asking, documents, options.queries)
    own = VectorIndex.open(folder, kind, vectors)
    depth, recall = choose_depth(own, queries, options.recall_floor)
    if kind is IndexKind.CAGRA:  # a service may search it on either: both must reach the floor
        on_gpu, there = choose_depth(GpuGraph(own), queries, options.recall_floor)
        depth, recall = max((depth, recall), (on_gpu, there), key=itemgetter(0))
    return kind, parameters, depth, recall

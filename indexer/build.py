"""Corpus in, snapshot out: read, cut, encode what is new, index, check, write. Publishing is a decision of its own."""

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

from indexer.checks import FLOOR, Changes, changes_since_published, choose_depth, encode_queries, sample_queries
from indexer.corpus import Document, FieldMap, Rejects, read_corpus
from indexer.embed import Rows, embed
from indexer.encode import Encoder, EncodeShards, Work, checked, chunked, content_hashes, encode_here
from indexer.errors import BadBuild
from indexer.fresh import LogWord
from indexer.passages import Budget, Cutter, passage_texts
from indexer.store.arrays import Array
from indexer.store.collection import Collection, new_version
from indexer.store.documents import Documents
from indexer.store.files import DiskDict
from indexer.store.kinds import FLAT_PASSAGES, IndexKind
from indexer.store.manifest import Built, Corrected, Counts, DocumentEncoder, Facts, Included, Recall
from indexer.store.shards import Shards, open_shards
from indexer.store.vectors import CardGraph, VectorIndex, limit_threads
from indexer.store.writer import SnapshotWriter
from models.correction import SAMPLE, names_of
from models.package import care_version
from models.progress import Progress
from models.sampling import sample_rows
from models.spec import Side

READ_CHUNK = 512
BAR_TEXTS = 32


@dataclass(frozen=True)
class BuildOptions:
    """How to build. None leaves the choice to the build: by what the encoder says, by the corpus's size.

    `queries` are what the recall of the index is measured by; none: some are made of the documents. `query_encoder` is
    served with the snapshot, and reads fresh documents; None: the same encoder. `shards` is the folder or address where
    what is encoded lies until the build has ended (None: in the collection), `encode` who does it.
    """

    fields: FieldMap = field(default_factory=FieldMap)
    skip_bad: bool = False
    passage_tokens: int | None = None
    overlap: int = 64
    index: IndexKind | None = None
    recall_floor: float = FLOOR
    queries: tuple[str, ...] = ()
    query_encoder: Encoder | None = None
    shard_texts: int | None = None
    shards: str | None = None
    encode: EncodeShards = encode_here
    threads: int | None = None


@dataclass(frozen=True)
class BuildSummary:
    """What came of a build.

    `changes` are the documents that differ from the published version's; `encoded` is how many texts were read by the
    encoder, `reused` how many passages got a vector that was known; other passages repeat a text that was encoded.
    `recall` is None where the index is exact, `rejects_file` where bad rows were set aside, None where there were none.
    `posted` documents are in no corpus.
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
    """Columns of the corpus that no option names."""
    unchanged: bool = False
    """Whether the served version holds the same, so that the new one was dropped; `version` is the served one then."""

    def status(self, *, published: bool) -> str:
        return "unchanged" if self.unchanged else "published" if published else "built"


@dataclass(frozen=True)
class _Indexed:
    """The index that was built, and how far it is to be searched."""

    kind: IndexKind
    parameters: dict[str, int]
    depth: int = 0
    recall: Recall | None = None


@dataclass
class _Stages:
    """Seconds of each stage, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with Progress(name):
            yield
        self.seconds[name] = time.perf_counter() - start


def build(
    corpus: Sequence[Path], encoder: Encoder, collection: Collection, options: BuildOptions | None = None
) -> BuildSummary:
    """Builds the next version of the collection from corpus files or folders; publishes nothing.

    Raises Busy if another process builds there. Called again, it goes on with a build that was killed.
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
        # At a place that several collections may share, each has a folder of its own: it is removed at the end.
        name = f"{collection.identity()}/{encoder.fingerprint}" if options.shards else encoder.fingerprint
        place = open_shards(options.shards, name, collection.shards(encoder.fingerprint))
        summary = _build_version(corpus, encoder, collection, options, place)
        place.clear()  # whatever was encoded is in the version now
        collection.prune_log()
    return summary


def _build_version(
    corpus: Sequence[Path], encoder: Encoder, collection: Collection, options: BuildOptions, place: Shards
) -> BuildSummary:
    version, created, stages = new_version(), datetime.now(UTC), _Stages()
    budget = Budget(options.passage_tokens or encoder.spec.max_length, options.overlap)
    cutter = Cutter(encoder.tokenizer, encoder.spec.document_instruction, budget)
    word = LogWord.read(collection)
    columns: set[str] = set()
    rejects = Rejects(collection.rejects / f"{version}.jsonl" if options.skip_bad else None)
    with collection.building(version) as folder, SnapshotWriter(folder) as writer:
        with stages.timed("read"), rejects, closing(DiskDict(folder / "ids")) as ids:
            read = read_corpus(corpus, options.fields, rejects, ids, word, columns)
            kept = _read(read, encoder, cutter, writer)
            documents, passages, hashes = writer.close_documents()
            writer.write_withdrawn(word.withdrawn())
        texts = partial(passage_texts, documents, passages)
        with stages.timed("encode"):
            composed = partial(_compose, cutter, texts)
            work = Work(place, options.shard_texts or encoder.bulk_texts, options.encode)
            reuse, encoded, reused = embed(hashes, composed, encoder, collection, work)
            vectors = writer.write_vectors(reuse.vectors(), encoder.spec.dim)
            other = options.query_encoder or encoder
            correction = _read_sample(writer, len(vectors), encoder, composed, other)
        with stages.timed("index"):
            indexed = _index(writer, folder, vectors, other, documents, options)
        with stages.timed("lexical"):
            every = Progress("words", "passages", len(passages)).over(texts(range(len(passages))))
            writer.write_lexical(f"{title}\n{text}" for title, text in every)
        with stages.timed("write"):
            counts = Counts(documents=len(documents), passages=len(passages), rejects=rejects.count)
            fresh = Included(position=word.position, posted=kept)
            asking = admitted(collection, encoder, other)
            writer.finish(_facts(version, created, encoder, budget, counts, indexed, fresh, correction, asking))
        changes = changes_since_published(collection, documents, word.deleted)
    return BuildSummary(
        version=version,
        folder=collection.folder(version),
        counts=counts,
        changes=changes,
        encoded=encoded,
        reused=reused,
        index=indexed.kind,
        recall=indexed.recall,
        rejects_file=rejects.path if rejects.count else None,
        ignored=tuple(sorted(columns - options.fields.used_names())),
        posted=kept,
        seconds=stages.seconds,
    )


def _read(corpus: Iterable[Document], encoder: Encoder, cutter: Cutter, writer: SnapshotWriter) -> int:
    """Cuts documents as they come and writes them with the content hashes of their passages.

    Returns how many of the last are in no corpus.
    """
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


def _compose(cutter: Cutter, texts: Callable[[Rows], Iterator[tuple[str, str]]], rows: Rows) -> Iterator[str]:
    """What the encoder reads of the passages in `rows`."""
    return (cutter.compose(title, text) for title, text in texts(rows))


def admitted(collection: Collection, encoder: Encoder, other: Encoder) -> tuple[str, ...]:
    """Identities of the query encoders that may search a new version.

    They are those of the encoders at hand that read queries, and those that the served version admits, if the same
    document encoder made it.
    """
    served = collection.served_manifest()
    same = served is not None and served.encoder.fingerprint == encoder.fingerprint
    before = served.query_encoders if served is not None and same else ()
    here = (each.spec.identities for each in (encoder, other) if Side.QUERY in each.spec.sides)
    return tuple(sorted({*before, *chain.from_iterable(here)}))


def _read_sample(
    writer: SnapshotWriter, passages: int, encoder: Encoder, composed: Callable[[Rows], Iterator[str]], other: Encoder
) -> Corrected | None:
    """Has another encoder, which will read fresh documents, read some passages; None where it is the same encoder."""
    if encoder.fingerprint in names_of(other):
        return None
    rows, side = sample_rows(passages, SAMPLE), other.spec.document_side
    texts = Progress("read by the query encoder", "passages", len(rows)).over(composed(rows))
    # In small parts, for the bar's sake: a large encoder takes minutes on a processor.
    parts = (checked(other.encode(some, side), "query encoder") for some in chunked(texts, BAR_TEXTS))
    writer.write_correction(parts, encoder.spec.dim)
    return Corrected(encoders=tuple(sorted(names_of(other))), passages=len(rows))


def _index(
    writer: SnapshotWriter,
    folder: Path,
    vectors: Array,
    asking: Encoder,
    documents: Documents,
    options: BuildOptions,
) -> _Indexed:
    """Builds the index and measures with `asking` how far it must be searched; an exact one needs no check."""
    kind = options.index or (IndexKind.FLAT if len(vectors) <= FLAT_PASSAGES else IndexKind.HNSW)
    parameters = writer.write_index(vectors, kind)
    if kind is IndexKind.FLAT:
        return _Indexed(kind, parameters)
    queries = encode_queries(asking, options.queries or sample_queries(documents))
    own = VectorIndex.open(folder, kind, *vectors.shape)
    depth, recall = choose_depth(own, queries, options.recall_floor)
    if kind is IndexKind.CAGRA:  # which a service may walk on either: both must reach the floor
        on_card, there = choose_depth(CardGraph(own), queries, options.recall_floor)
        depth, recall = max((depth, recall), (on_card, there), key=itemgetter(0))
    return _Indexed(kind, parameters, depth, recall)


def _facts(
    version: str,
    created: datetime,
    encoder: Encoder,
    budget: Budget,
    counts: Counts,
    indexed: _Indexed,
    fresh: Included,
    correction: Corrected | None,
    query_encoders: tuple[str, ...],
) -> Facts:
    return Facts(
        version=version,
        space=encoder.spec.space,
        encoder=DocumentEncoder(fingerprint=encoder.fingerprint, variant=encoder.variant),
        dim=encoder.spec.dim,
        counts=counts,
        built=Built(
            index=indexed.kind,
            index_parameters=indexed.parameters,
            search_depth=indexed.depth,
            recall=indexed.recall,
            passage_tokens=budget.tokens,
            passage_overlap=budget.overlap,
            care_version=care_version(),
            created=created,
        ),
        fresh=fresh,
        correction=correction,
        query_encoders=query_encoders,
    )

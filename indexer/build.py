"""Corpus in, snapshot out: read, cut, encode, index, write. Publishing is a decision of its own (`publish`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from indexer.corpus import FieldMap, read_corpus
from indexer.encode import chunked, encode_passages
from indexer.errors import BadBuild
from indexer.passages import Budget, Cutter
from indexer.rejects import Rejects
from indexer.store.collection import Collection, new_version
from indexer.store.documents import Documents
from indexer.store.manifest import Built, Counts, DocumentEncoder, Facts
from indexer.store.passages import Passages
from indexer.store.vectors import HNSW_EF_CONSTRUCTION, HNSW_LINKS, IndexKind, limit_threads
from indexer.store.writer import SnapshotWriter
from models.onnx_encoder import OnnxEncoder
from models.spec import Side

READ_CHUNK = 512
# Exact search over this many passages takes a few milliseconds on one core; beyond it the graph is worth its build.
FLAT_PASSAGES = 20_000


@dataclass(frozen=True)
class BuildOptions:
    """How to build. None leaves the choice to the build: by the encoder's max_length, by the corpus's size."""

    fields: FieldMap = field(default_factory=FieldMap)
    skip_bad: bool = False
    passage_tokens: int | None = None
    overlap: int = 64
    index: IndexKind | None = None
    threads: int | None = None


@dataclass(frozen=True)
class BuildSummary:
    """What came of a build. `rejects_file` is where bad rows were set aside, None where there were none."""

    version: str
    folder: Path
    counts: Counts
    index: IndexKind
    rejects_file: Path | None
    seconds: dict[str, float]


@dataclass
class _Stages:
    """Seconds of each stage, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def build(
    corpus: Sequence[Path], encoder: OnnxEncoder, collection: Collection, options: BuildOptions | None = None
) -> BuildSummary:
    """Builds the next version of the collection from corpus files or folders; publishes nothing."""
    options = options or BuildOptions()
    spec = encoder.spec
    if Side.DOCUMENT not in spec.sides:
        raise BadBuild(f"the encoder of space {spec.space} reads queries only; index with its document encoder")
    if options.threads is not None:
        limit_threads(options.threads)
    budget = Budget(options.passage_tokens or spec.max_length, options.overlap)
    cutter = Cutter(encoder.tokenizer, spec.document_instruction, budget)
    version, created = new_version(), datetime.now(UTC)
    rejects_file = collection.root / "rejects" / f"{version}.jsonl" if options.skip_bad else None
    stages = _Stages()
    with collection.building(version) as folder, SnapshotWriter(folder) as writer:
        with stages.timed("read"), Rejects(rejects_file) as rejects:
            for documents in chunked(read_corpus(corpus, options.fields, rejects), READ_CHUNK):
                spans = cutter.cut([d.title for d in documents], [d.text for d in documents])
                for document, its_spans in zip(documents, spans, strict=True):
                    writer.add(document.id, document.title, document.text, document.metadata, its_spans)
        stored, passages = writer.close_documents()
        with stages.timed("encode"):
            vectors = writer.create_vectors(len(passages), spec.dim)
            composed = (cutter.compose(title, text) for title, text in _texts(stored, passages))
            writer.write_hashes(encode_passages(composed, encoder, vectors))
        with stages.timed("index"):
            kind = options.index or (IndexKind.FLAT if len(passages) <= FLAT_PASSAGES else IndexKind.HNSW)
            writer.write_index(vectors, kind)
        with stages.timed("lexical"):
            writer.write_lexical(f"{title}\n{text}" for title, text in _texts(stored, passages))
        with stages.timed("write"):
            counts = Counts(documents=len(stored), passages=len(passages), rejects=rejects.count)
            encoded_by = DocumentEncoder(fingerprint=encoder.fingerprint, variant=encoder.variant)
            built = _built(kind, budget, created)
            writer.finish(
                Facts(version=version, space=spec.space, encoder=encoded_by, dim=spec.dim, counts=counts, built=built)
            )
    set_aside = rejects_file if rejects.count else None
    return BuildSummary(version, collection.folder(version), counts, kind, set_aside, stages.seconds)


def _texts(documents: Documents, passages: Passages) -> Iterator[tuple[str, str]]:
    """Title and text of every passage, in row order; a document is parsed once for all its passages."""
    at, title, text = -1, "", ""
    for row, document_row in enumerate(passages.documents.tolist()):
        if document_row != at:
            document = documents.get(document_row)
            at, title, text = document_row, document.title, document.text
        start, end = passages.span(row)
        yield title, text[start:end]


def _built(kind: IndexKind, budget: Budget, created: datetime) -> Built:
    hnsw = {"links": HNSW_LINKS, "ef_construction": HNSW_EF_CONSTRUCTION}
    return Built(
        index=kind,
        index_parameters=hnsw if kind is IndexKind.HNSW else {},
        passage_tokens=budget.tokens,
        passage_overlap=budget.overlap,
        care_version=_care_version(),
        created=created,
    )


def _care_version() -> str:
    try:
        return installed_version("care-search")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"

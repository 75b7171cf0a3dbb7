"""Documents as the service's own encoder reads them: cut as the indexer cuts, encoded through the engine.

The encoder reads a document as a document where it is made to, else as a query: the sides of a pair share a space
(docs/adr/0012-fresh-documents.md). Knows nothing of logs or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexer.passages import Budget, Cutter
from indexer.store.documents import Span, StoredDocument
from indexer.store.filters import Metadata
from indexer.store.fresh_log import Frame, Posted
from models.correction import names_of
from service.embed import Embedder
from service.line import Deadline
from service.serving import Serving
from service.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewDocument:
    """What somebody posts."""

    id: str
    title: str
    text: str
    metadata: Metadata

    @classmethod
    def of(cls, posted: Posted) -> NewDocument:
        return cls(posted.id, posted.title, posted.text, posted.metadata)

    def stored(self) -> StoredDocument:
        return StoredDocument.of(self.id, self.title, self.text, self.metadata)


class DocumentEncoder:
    """Makes of documents what the log keeps of them."""

    def __init__(self, settings: Settings, embedder: Embedder) -> None:
        self._timeout_ms = settings.timeout_ms
        self._embedder = embedder
        self._warned: str | None = None

    async def encode(
        self, serving: Serving, documents: Sequence[NewDocument], admit: Callable[[int], None]
    ) -> list[Posted]:
        """Spans and vectors of each document, in order; raises what the engine's queue raises.

        `admit` is called with the number of passages before any is encoded. A document whose title and text the
        snapshot has under its id takes the vectors from there: they are the document encoder's, and better.
        """
        known = {place: _from_snapshot(serving, document) for place, document in enumerate(documents)}
        unread = [document for place, document in enumerate(documents) if known[place] is None]
        reused = sum(len(each.spans) for each in known.values() if each is not None)
        made = iter(await self._read(serving, unread, lambda cut: admit(cut + reused)))
        return [known[place] or next(made) for place in range(len(documents))]

    async def translate(self, serving: Serving, frames: Sequence[Frame]) -> list[Frame]:
        """Frames whose vectors this serving can search: what other encoders made is made again."""
        own, indexed = serving.encoder, serving.snapshot.manifest.encoder
        posted = [change for frame in frames for change in frame.changes if isinstance(change, Posted)]
        if any(each.encoder != indexed.fingerprint for each in posted):
            self._warn(serving)
        known = own.fingerprint, indexed.fingerprint
        foreign = [each for each in posted if each.encoder not in known or each.vectors.shape[1] != own.spec.dim]
        if not foreign:
            return list(frames)
        documents = [NewDocument.of(each) for each in foreign]
        made = dict(zip(map(id, foreign), await self._read(serving, documents, lambda cut: None), strict=True))
        return [replace(frame, changes=[made.get(id(change), change) for change in frame.changes]) for frame in frames]

    def _warn(self, serving: Serving) -> None:
        """Says once for a snapshot that scores of what was posted do not compare with its own, and what to do."""
        manifest, encoder = serving.snapshot.manifest, serving.encoder
        corrected = manifest.correction is not None and encoder.fingerprint in manifest.correction.encoders
        if corrected or manifest.encoder.fingerprint in names_of(encoder) or self._warned == serving.version:
            return
        self._warned = serving.version
        logger.warning(
            "encoder %s reads fresh documents, snapshot %s was read by %s, and their scores do not compare: fresh ones "
            "rank too high or too low until a version is built with --query-encoder FOLDER (that of CARE_ENCODER)",
            encoder.fingerprint,
            serving.version,
            manifest.encoder.fingerprint,
        )

    async def _read(
        self, serving: Serving, documents: Sequence[NewDocument], admit: Callable[[int], None]
    ) -> list[Posted]:
        spans, texts = await asyncio.to_thread(_cut, serving, documents) if documents else ([], [])
        admit(len(texts))
        if not documents:
            return []
        side, deadline = serving.encoder.spec.document_side, Deadline(None, self._timeout_ms)
        embedded = await self._embedder.embed(serving, texts, side, deadline=deadline)
        vectors = embedded.vectors.astype(np.float16)
        ends = np.cumsum([len(own) for own in spans]).tolist()
        return [
            Posted(
                document.id,
                document.title,
                document.text,
                document.metadata,
                own,
                serving.encoder.fingerprint,
                vectors[end - len(own) : end],
            )
            for document, own, end in zip(documents, spans, ends, strict=True)
        ]


def _cut(serving: Serving, documents: Sequence[NewDocument]) -> tuple[list[list[Span]], list[str]]:
    """The spans of each document, and what the encoder reads of all, one after the other.

    Passages are as long as the snapshot's. An encoder that reads less of a text reads how they begin, as it did for
    the build: in pieces of its own a document would have several chances where its indexed self has one.
    """
    built, spec = serving.snapshot.manifest.built, serving.encoder.spec
    budget = Budget(built.passage_tokens, built.passage_overlap)
    cutter = Cutter(serving.encoder.tokenizer, spec.instruction(spec.document_side), budget)
    spans = cutter.cut([document.title for document in documents], [document.text for document in documents])
    texts = [
        cutter.compose(document.title, document.text[start:end])
        for document, own in zip(documents, spans, strict=True)
        for start, end in own
    ]
    return spans, texts


def _from_snapshot(serving: Serving, document: NewDocument) -> Posted | None:
    """The document with the snapshot's spans and vectors, where that has its very title and text."""
    snapshot = serving.snapshot
    row = snapshot.documents.row_of(document.id)
    if row is None:
        return None
    stored = snapshot.documents.get(row)
    if (stored.title, stored.text) != (document.title, document.text):
        return None
    passages = snapshot.passages.of(row)
    return Posted(
        document.id,
        document.title,
        document.text,
        document.metadata,
        [snapshot.passages.span(passage) for passage in passages],
        snapshot.manifest.encoder.fingerprint,
        snapshot.values[passages.start : passages.stop],
    )

"""Encodes posted documents with the service's own encoder, and applies the log to a serving.

Documents are cut as the indexer cuts them. The encoder reads them as documents if it can, else as queries: both sides
share a space (docs/adr/0012-fresh-documents.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from indexer.passages import Budget, Cutter
from indexer.store.documents import Span
from indexer.store.fresh_log import Frame, FreshLog, NewDocument, Posted
from models.correction import names_of
from service.search.portions import Deadline
from service.serving.serving import Serving

if TYPE_CHECKING:
    from service.search.embedder import Embedder
    from service.settings import Settings

logger = logging.getLogger(__name__)


class DocumentEncoder:
    """Encodes documents into log records."""

    def __init__(self, settings: Settings, embedder: Embedder) -> None:
        self._timeout_ms = settings.timeout_ms
        self._embedder = embedder
        self._warned: str | None = None

    async def encode(
        self, serving: Serving, documents: Sequence[NewDocument], admit: Callable[[int], None]
    ) -> list[Posted]:
        """Spans and vectors of each document, in order; raises what the engine's queue raises.

        `admit` is called with the number of passages before any is encoded. A document that the snapshot has with
        equal id, title and text takes its vectors from there: they are the document encoder's, and better.
        """
        known = [_from_snapshot(serving, document) for document in documents]
        unread = [document for document, found in zip(documents, known, strict=True) if found is None]
        reused = sum(len(found.spans) for found in known if found is not None)
        made = iter(await self._encode(serving, unread, lambda count: admit(count + reused)))
        return [found or next(made) for found in known]

    async def translate(self, serving: Serving, frames: Sequence[Frame]) -> list[Frame]:
        """Frames whose vectors this serving can search: vectors of other encoders are computed again."""
        own, indexed = serving.encoder, serving.snapshot.manifest.encoder
        posted = [change for frame in frames for change in frame.changes if isinstance(change, Posted)]
        if any(each.encoder != indexed.fingerprint for each in posted):
            self._warn(serving)
        known = own.fingerprint, indexed.fingerprint
        foreign = [each for each in posted if each.encoder not in known or each.vectors.shape[1] != own.spec.dim]
        if not foreign:
            return list(frames)
        made = dict(zip(map(id, foreign), await self._encode(serving, foreign, lambda count: None), strict=True))
        return [replace(frame, changes=[made.get(id(change), change) for change in frame.changes]) for frame in frames]

    def _warn(self, serving: Serving) -> None:
        """Logs once for a snapshot that scores of posted documents do not compare with its own, and the remedy."""
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

    async def _encode(
        self, serving: Serving, documents: Sequence[NewDocument], admit: Callable[[int], None]
    ) -> list[Posted]:
        spans, texts = await asyncio.to_thread(_cut, serving, documents) if documents else ([], [])
        admit(len(texts))
        if not documents:
            return []
        side, deadline = serving.encoder.spec.document_side, Deadline(None, self._timeout_ms)
        vectors = (await self._embedder.embed(serving, texts, side, deadline=deadline)).vectors.astype(np.float16)
        ends = np.cumsum([len(own) for own in spans]).tolist()
        return [
            document.encoded(own, serving.encoder.fingerprint, vectors[end - len(own) : end])
            for document, own, end in zip(documents, spans, ends, strict=True)
        ]


def _cut(serving: Serving, documents: Sequence[NewDocument]) -> tuple[list[list[Span]], list[str]]:
    """Returns the spans of each document, and the texts that the encoder reads of all, in order.

    Passages are as long as the snapshot's. An encoder that reads less of a text reads their beginnings, as in the
    build: in shorter pieces a document would have more chances than its indexed version.
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
    """Returns the document with the snapshot's spans and vectors, if the snapshot has its title and text."""
    snapshot = serving.snapshot
    row = snapshot.documents.row_of(document.id)
    if row is None:
        return None
    stored = snapshot.documents.get(row)
    if (stored.title, stored.text) != (document.title, document.text):
        return None
    passages = snapshot.passages.of(row)
    spans = [snapshot.passages.span(passage) for passage in passages]
    vectors = snapshot.values[passages.start : passages.stop]
    return document.encoded(spans, snapshot.manifest.encoder.fingerprint, vectors)


async def freshen(log: FreshLog, encoder: DocumentEncoder, serving: Serving) -> Serving:
    """Returns the serving with all of the log; itself if nothing was added. Raises BadLog."""
    frames, cursor = await asyncio.to_thread(log.read, serving.cursor)
    if cursor == serving.cursor:
        return serving
    overlay = serving.overlay
    if frames:
        overlay = await asyncio.to_thread(overlay.apply, await encoder.translate(serving, frames))
    return replace(serving, overlay=overlay, cursor=cursor)

"""Asks a version the canaries of its collection: a version that fails one is not published."""

from __future__ import annotations

from contextlib import ExitStack, closing

from indexer.encode import Encoder
from indexer.errors import Blocked
from indexer.probe import top_documents
from indexer.store.canaries import CANARIES_FILE, Canary, failures_of
from indexer.store.collection import Collection
from indexer.store.fresh_log import Cursor
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot


def check_canaries(collection: Collection, version: str, encoder: Encoder, canaries: list[Canary]) -> None:
    """Asks a version as it would be served: in the collection's database, if any, with what was posted and deleted
    since it was built. Raises Blocked that names the first queries whose documents were not found.
    """
    snapshot = Snapshot.open(collection.folder(version), verify=False)
    snapshot.manifest.require_encoder(encoder.spec)
    frames, _ = collection.fresh_log.read(Cursor(snapshot.manifest.fresh.position))
    with ExitStack() as stack:
        vectors = None
        if collection.database is not None:
            vectors = stack.enter_context(closing(collection.database.connect())).open(snapshot)
        answers = top_documents(
            snapshot,
            encoder,
            [canary.query for canary in canaries],
            max(canary.within for canary in canaries),
            vectors=vectors,
            overlay=Overlay.over(snapshot).apply(frames),
        )
    if failures := failures_of(canaries, answers):
        raise Blocked(
            f"{version} is not published: {failures}. Correct the corpus or {collection.root / CANARIES_FILE}, "
            "or run care index publish --force"
        )

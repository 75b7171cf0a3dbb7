"""Queries that must find certain documents: a snapshot that fails one is not published.

The file is JSON lines: {"query": "高血压吃什么药", "must": ["drug-001"], "within": 10}; `within` is 10 unless given.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexer.encode import Encoder
from indexer.errors import BadQueries, Blocked
from indexer.probe import TOP, top_documents
from indexer.store.collection import Collection
from indexer.store.fresh_log import Cursor
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot

SHOWN = 3
CANARIES_FILE = "canaries.jsonl"


class Canary(BaseModel):
    """A query and the documents that must be among its `within` best."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: Annotated[str, Field(min_length=1)]
    must: Annotated[tuple[str, ...], Field(min_length=1)]
    within: Annotated[int, Field(gt=0, le=100)] = TOP


def load_canaries(path: Path) -> list[Canary]:
    """Every line of the file; raises BadQueries that names the line that is none."""
    canaries = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadQueries(f"{path} cannot be read ({error.strerror}); give a file of queries, or none") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                canaries.append(Canary.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                reason = ": ".join([*map(str, first["loc"]), first["msg"]])
                raise BadQueries(f"{path}:{number}: {reason}; see care index build --help") from error
    if not canaries:
        raise BadQueries(f"{path} holds no query; write one, or leave --canaries out")
    return canaries


def keep_canaries(collection: Collection, path: Path) -> None:
    """Keeps the file with the collection: a later publish or rollback runs its queries too."""
    kept = collection.root / CANARIES_FILE
    unfinished = kept.with_name(f".{CANARIES_FILE}")
    unfinished.write_bytes(path.read_bytes())
    unfinished.replace(kept)


def kept_canaries(collection: Collection) -> list[Canary]:
    """The queries that `keep_canaries` kept; none if no build was given any."""
    kept = collection.root / CANARIES_FILE
    return load_canaries(kept) if kept.exists() else []


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
    failures = [
        f"{canary.query!r} lacks {', '.join(lacking)} among its first {canary.within}"
        for canary, answer in zip(canaries, answers, strict=True)
        if (lacking := [one for one in canary.must if one not in answer[: canary.within]])
    ]
    if failures:
        more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
        raise Blocked(
            f"{version} is not published: {len(failures)} of {len(canaries)} canaries fail: "
            f"{'; '.join(failures[:SHOWN])}{more}. Correct the corpus or "
            f"{collection.root / CANARIES_FILE}, or run care index publish --force"
        )

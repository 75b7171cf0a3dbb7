"""Stores a collection's canaries: queries that must find certain documents.

The file is JSON lines: {"query": "高血压吃什么药", "must": ["drug-001"], "within": 10}; `within` defaults to 10.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexer.errors import BadQueries
from indexer.store.files import replace_file

TOP = 10
SHOWN = 3
CANARIES_FILE = "canaries.jsonl"


class Canary(BaseModel):
    """A query and the documents that must be among its `within` best."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: Annotated[str, Field(min_length=1)]
    must: Annotated[tuple[str, ...], Field(min_length=1)]
    within: Annotated[int, Field(gt=0, le=100)] = TOP


def load_canaries(path: Path) -> list[Canary]:
    """Reads every line of the file; raises BadQueries that names a bad line."""
    canaries = []
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
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


def keep_canaries(root: Path, path: Path) -> None:
    """Copies the file into a collection's folder: a later publish or rollback runs its queries too."""
    replace_file(root / CANARIES_FILE, path.read_bytes())


def kept_canaries(root: Path) -> list[Canary]:
    """Returns the queries that `keep_canaries` kept; none if no build was given any."""
    kept = root / CANARIES_FILE
    return load_canaries(kept) if kept.exists() else []


def failures_of(canaries: Sequence[Canary], answers: Sequence[Sequence[str]]) -> str | None:
    """Describes the canaries whose documents are not among the ids that were found; None if all are."""
    failures = [
        f"{canary.query!r} lacks {', '.join(lacking)} among its first {canary.within}"
        for canary, answer in zip(canaries, answers, strict=True)
        if (lacking := [one for one in canary.must if one not in answer[: canary.within]])
    ]
    if not failures:
        return None
    more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
    return f"{len(failures)} of {len(canaries)} canaries fail: {'; '.join(failures[:SHOWN])}{more}"

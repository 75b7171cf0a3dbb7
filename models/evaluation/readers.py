"""Reads texts of a task as vectors: with the task's instruction, a cache, and another encoder for documents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.encoder.onnx import bulk_batches
from models.encoder.spec import Side
from models.errors import BadEncoder, SpaceMismatch
from models.evaluation.cache import VectorCache, Vectors
from models.evaluation.encoders import OpenEncoder
from models.evaluation.results import SystemFacts
from models.evaluation.sets import Task

# What is encoded, kept and reported together: some seconds of work. Longer texts are cut by most encoders.
CHUNK_CHARACTERS, LONGEST = 32_768, 512


class Reader(Protocol):
    """Turns texts of a task into unit vectors (texts, dim)."""

    @property
    def facts(self) -> SystemFacts: ...
    @property
    def trust(self) -> float:
        """The query encoder's `dense_trust`, for fusion."""
        ...

    def read(self, texts: Sequence[str], side: Side, task: Task, *, cached: bool = True) -> Vectors:
        """Encodes texts; `cached=False` ignores the cache, for timing."""
        ...


class EncoderReader:
    """One encoder with the task's instruction or its own; `advance` is called with the characters encoded."""

    def __init__(
        self, encoder: OpenEncoder, cache: VectorCache | None, advance: Callable[[int], object] = lambda count: None
    ) -> None:
        self.encoder, self._cache, self._advance = encoder, cache, advance

    @property
    def facts(self) -> SystemFacts:
        encoder = self.encoder
        return SystemFacts(encoder.name, "encoder", encoder.fingerprint, encoder.spec.dim, encoder.parameters)

    @property
    def trust(self) -> float:
        return self.encoder.spec.dense_trust

    def read(self, texts: Sequence[str], side: Side, task: Task, *, cached: bool = True) -> Vectors:
        prompt, cache = self._prompt(side, task), self._cache if cached else None
        prompts = _prompted(prompt, texts)
        vectors = self._encode(prompts, prompt) if cache is None else self._cached(prompts, prompt, cache)
        return vectors if self.encoder.parts is None else self.encoder.parts.join(vectors, side)

    def _cached(self, prompts: Sequence[str], prompt: str, cache: VectorCache) -> Vectors:
        vectors = np.empty((len(prompts), self.encoder.cached_as[1]), dtype=np.float32)
        if missing := cache.find(prompts, vectors):
            new = list(dict.fromkeys(prompts[row] for row in missing))
            for rows in bulk_batches([size(text) for text in new], CHUNK_CHARACTERS):
                chunk = [new[row] for row in rows]
                cache.add(chunk, self._encode(chunk, prompt))
                self._advance(sum(map(size, chunk)))
            cache.find(prompts, vectors)
        return vectors

    def unread(self, tasks: Iterable[Task], sides: Collection[Side]) -> set[str]:
        """Returns what has yet to be encoded before the tasks can be judged, as the encoder will read it."""
        read = ((task, side, texts) for task in tasks for side, texts in task.texts() if side in sides)
        prompts = {text for task, side, texts in read for text in _prompted(self._prompt(side, task), texts)}
        return prompts if self._cache is None else set(self._cache.unknown(prompts))

    def _prompt(self, side: Side, task: Task) -> str:
        spec, stated = self.encoder.spec, task.instruction(side)
        given = spec.prompt(stated or "") if side is Side.QUERY else stated or ""
        return spec.instruction(side) if stated is None else given

    def _encode(self, prompts: Sequence[str], prompt: str) -> Vectors:
        """Refuses a vector that is zero or not finite: it would rank at random, and would be kept."""
        parts = self.encoder.parts
        vectors = self.encoder.encode(prompts) if parts is None else parts.encode(prompts, prompt)
        if not (np.isfinite(vectors).all() and vectors.any(axis=1).all()):
            raise BadEncoder(
                f"{self.encoder.name}: the encoder gave a vector that is zero or not finite; export or train it again"
            )
        return vectors


@dataclass(frozen=True, slots=True)
class PairReader:
    """Queries by one encoder and documents by another of the same space."""

    query: EncoderReader
    document: EncoderReader

    def __post_init__(self) -> None:
        first, second = self.query.encoder, self.document.encoder
        if (first.spec.space, first.spec.dim) != (second.spec.space, second.spec.dim):
            raise SpaceMismatch(
                f"{first.name} gives {first.spec.dim} dimensions of space {first.spec.space}, {second.name} "
                f"{second.spec.dim} of {second.spec.space}; take two encoders that were trained as a pair"
            )

    @property
    def facts(self) -> SystemFacts:
        first, second = self.query.facts, self.document.facts
        fingerprint = f"{first.fingerprint}+{second.fingerprint}"
        return SystemFacts(f"{first.name} + {second.name}", "pair", fingerprint, first.dim, first.parameters)

    @property
    def trust(self) -> float:
        return self.query.trust

    def read(self, texts: Sequence[str], side: Side, task: Task, *, cached: bool = True) -> Vectors:
        return (self.query if side is Side.QUERY else self.document).read(texts, side, task, cached=cached)


@dataclass(frozen=True, slots=True)
class CutReader:
    """The first dimensions of another reader's vectors, brought back to unit length."""

    whole: Reader
    dim: int

    @property
    def facts(self) -> SystemFacts:
        facts = self.whole.facts
        return SystemFacts(f"{facts.name} {self.dim}d", facts.kind, facts.fingerprint, self.dim, facts.parameters)

    @property
    def trust(self) -> float:
        return self.whole.trust

    def read(self, texts: Sequence[str], side: Side, task: Task, *, cached: bool = True) -> Vectors:
        return unit(self.whole.read(texts, side, task, cached=cached)[:, : self.dim])


def unit(vectors: Vectors) -> Vectors:
    """Returns rows brought to unit length."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: Vectors = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    return rows


def _prompted(prompt: str, texts: Sequence[str]) -> Sequence[str]:
    return [prompt + text for text in texts] if prompt else texts


def size(prompt: str) -> int:
    """Returns the work of encoding a text, in characters."""
    return min(len(prompt), LONGEST)

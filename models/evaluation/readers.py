"""Who turns a task's texts into vectors: one encoder, a pair of them, or the first dimensions of either.

A reader adds the task's instruction, or the encoder's own, and keeps what it encodes in the cache. Knows nothing of
search or metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.errors import BadEncoder, SpaceMismatch
from models.evaluation.cache import VectorCache, Vectors
from models.evaluation.encoders import OpenEncoder
from models.evaluation.results import SystemFacts
from models.evaluation.sets import Task
from models.onnx_encoder import bulk_batches
from models.spec import Side

# What is encoded, kept and reported together: some seconds of work. Longer texts are cut by most encoders.
CHUNK_CHARACTERS, LONGEST = 32_768, 512


class Reader(Protocol):
    """Turns texts of a task into unit vectors (texts, dim)."""

    @property
    def facts(self) -> SystemFacts: ...

    def read(self, texts: Sequence[str], side: Side, task: Task) -> Vectors: ...

    def uncached(self) -> Reader:
        """The same function without its cache, for timing."""
        ...


class EncoderReader:
    """One encoder; `advance` is told how many characters were encoded."""

    def __init__(
        self, encoder: OpenEncoder, cache: VectorCache | None, advance: Callable[[int], object] = lambda count: None
    ) -> None:
        self.encoder, self._cache, self._advance = encoder, cache, advance

    @property
    def facts(self) -> SystemFacts:
        encoder = self.encoder
        return SystemFacts(encoder.name, "encoder", encoder.fingerprint, encoder.spec.dim, encoder.parameters)

    def read(self, texts: Sequence[str], side: Side, task: Task) -> Vectors:
        prompts = self._prompts(texts, side, task)
        if self._cache is None:
            return _checked(self.encoder, self.encoder.encode(prompts))
        vectors = np.empty((len(prompts), self.encoder.spec.dim), dtype=np.float32)
        missing = self._cache.find(prompts, vectors)
        if missing:
            self._encode(list(dict.fromkeys(prompts[row] for row in missing)), self._cache)
            self._cache.find(prompts, vectors)
        return vectors

    def unread(self, tasks: Iterable[Task], sides: Collection[Side]) -> set[str]:
        """What has yet to be encoded before the tasks can be judged, as the encoder will read it."""
        prompts = {
            prompt
            for task in tasks
            for side, texts in task.texts()
            if side in sides
            for prompt in self._prompts(texts, side, task)
        }
        return prompts if self._cache is None else set(self._cache.unknown(prompts))

    def uncached(self) -> EncoderReader:
        return EncoderReader(self.encoder, None)

    def _prompts(self, texts: Sequence[str], side: Side, task: Task) -> Sequence[str]:
        spec, stated = self.encoder.spec, task.instruction(side)
        given = spec.prompt(stated or "") if side is Side.QUERY else stated or ""
        prompt = spec.instruction(side) if stated is None else given
        return [prompt + text for text in texts] if prompt else texts

    def _encode(self, prompts: Sequence[str], cache: VectorCache) -> None:
        for rows in bulk_batches([size(prompt) for prompt in prompts], CHUNK_CHARACTERS):
            chunk = [prompts[row] for row in rows]
            cache.add(chunk, _checked(self.encoder, self.encoder.encode(chunk)))
            self._advance(sum(map(size, chunk)))


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

    def read(self, texts: Sequence[str], side: Side, task: Task) -> Vectors:
        return (self.query if side is Side.QUERY else self.document).read(texts, side, task)

    def uncached(self) -> PairReader:
        return PairReader(self.query.uncached(), self.document.uncached())


@dataclass(frozen=True, slots=True)
class CutReader:
    """The first dimensions of another reader's vectors, brought back to unit length."""

    whole: Reader
    dim: int

    @property
    def facts(self) -> SystemFacts:
        facts = self.whole.facts
        return SystemFacts(f"{facts.name} {self.dim}d", facts.kind, facts.fingerprint, self.dim, facts.parameters)

    def read(self, texts: Sequence[str], side: Side, task: Task) -> Vectors:
        cut = self.whole.read(texts, side, task)[:, : self.dim]
        unit: Vectors = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return unit

    def uncached(self) -> CutReader:
        return CutReader(self.whole.uncached(), self.dim)


def size(prompt: str) -> int:
    """The work of encoding a text, in characters."""
    return min(len(prompt), LONGEST)


def _checked(encoder: OpenEncoder, vectors: Vectors) -> Vectors:
    """A vector that is not a number would rank at random, and would be kept."""
    if not np.isfinite(vectors).all():
        raise BadEncoder(f"{encoder.name}: the encoder gave a vector that is not finite; export or train it again")
    return vectors

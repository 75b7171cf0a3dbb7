"""From what a person asked for to the systems that are judged: folders opened once, caches shared, names told apart."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import BadEncoder, CareError
from models.evaluation.cache import VectorCache
from models.evaluation.encoders import Address, OpenEncoder, open_encoder
from models.evaluation.fresh import fresh_systems
from models.evaluation.readers import CutReader, EncoderReader, PairReader, Reader, size
from models.evaluation.sets import Task
from models.evaluation.systems import Dense, Hybrid, Lexical, System
from models.fusion import Fusion
from models.spec import Side

if TYPE_CHECKING:
    from models.evaluation.web import Endpoint

VECTORS, RANKINGS, DOCUMENTS = "vectors", "bm25", "hyde"
"""Folders of the cache."""
MODE = "mode"
MODES = ("dense", "lexical", "hybrid")
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which systems to judge. Encoders and services are addresses: PLACE,name=value,…"""

    encoders: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    services: Sequence[str] = ()
    bm25: bool = True
    hybrid: bool = True
    fusions: Sequence[Fusion] = (Fusion.SCORES,)
    weights: Sequence[float] = ()
    """The dense side's shares to try in score fusion; none: chosen by query."""
    dims: Sequence[int] = ()
    """Judge the encoders' first so many dimensions too."""
    fresh: bool = False
    """Judge pairs as they read fresh documents, too."""
    hyde: tuple[str, str] | None = None
    """Address of an endpoint, and its model."""
    hyde_documents: int = 1


class Lineup:
    """The systems, in the order of the table; `dense` are those of whole encoders and pairs.

    Connections are closed with `stack`; `advance` is told how many characters were encoded.
    """

    def __init__(self, wanted: Wanted, cache: Path, stack: ExitStack, advance: Callable[[int], object]) -> None:
        self._cache, self._stack, self._advance = cache, stack, advance
        self._encoders: dict[str, OpenEncoder] = {}
        self._vectors: dict[str, VectorCache] = {}
        self._sides: list[tuple[EncoderReader, tuple[Side, ...]]] = []
        _check(wanted)
        self.dense = [Dense(reader) for reader in self._readers(wanted)]
        self.systems: list[System] = list(self._systems(wanted))
        counts = Counter(system.facts.name for system in self.systems)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise CareError(
                f"two systems are called {twice!r}; give each once, folders different names, "
                "and a second service a run of its own (care eval diff)"
            )
        if not self.systems:
            raise CareError("no system to judge; give --encoder, --pair or --service")

    def outstanding(self, tasks: Sequence[Task]) -> int:
        """How many characters the encoders have yet to read."""
        unread = {
            (reader.encoder.fingerprint, text) for reader, sides in self._sides for text in reader.unread(tasks, sides)
        }
        return sum(size(text) for _, text in unread)

    def _readers(self, wanted: Wanted) -> Iterator[Reader]:
        for address in wanted.encoders:
            yield self._reader(address, tuple(Side))
        for query, document in wanted.pairs:
            yield PairReader(self._reader(query, (Side.QUERY,)), self._reader(document, (Side.DOCUMENT,)))

    def _reader(self, address: str, sides: tuple[Side, ...]) -> EncoderReader:
        if address not in self._encoders:
            self._encoders[address] = open_encoder(address)
        encoder = self._encoders[address]
        for side in sides:
            if side not in encoder.spec.sides:
                raise BadEncoder(f"{encoder.name} is not made to read a {side}; give it as half of a --pair")
        if encoder.fingerprint not in self._vectors:
            folder = self._cache / VECTORS / encoder.fingerprint
            self._vectors[encoder.fingerprint] = VectorCache(folder, encoder.spec.dim)
        reader = EncoderReader(encoder, self._vectors[encoder.fingerprint], self._advance)
        self._sides.append((reader, sides))
        return reader

    def _systems(self, wanted: Wanted) -> Iterator[System]:
        lexical = Lexical(self._cache / RANKINGS)
        if wanted.bm25:
            yield lexical
        yield from self.dense
        for dense in self.dense:
            yield from (Dense(_cut(dense.reader, dim)) for dim in wanted.dims)
        if wanted.hyde is not None:
            yield from self._hyde(wanted.hyde, wanted.hyde_documents)
        if wanted.fresh:
            for dense in self.dense:
                yield from fresh_systems(dense)
        if wanted.hybrid:
            for dense in self.dense:
                yield from (Hybrid(dense, lexical, *how) for how in _fusions(wanted))
        yield from map(self._service, wanted.services)

    def _hyde(self, address: tuple[str, str], documents: int) -> Iterator[System]:
        # Only who asks for them needs httpx.
        from models.evaluation.hyde import Generator, HydeReader

        key = os.environ.get(KEY)
        endpoint = self._endpoint(address[0], {"authorization": f"Bearer {key}"} if key else {})
        generator = Generator(endpoint, address[1], documents, self._cache / DOCUMENTS)
        yield from (Dense(HydeReader(dense.reader, generator)) for dense in self.dense)

    def _service(self, text: str) -> System:
        from models.evaluation.remote import Service

        address = Address.parse(text, (MODE,))
        mode = address.options.get(MODE)
        if mode is not None and mode not in MODES:
            raise CareError(f"{MODE}={mode}: choose from {', '.join(MODES)}")
        return Service(self._endpoint(address.place, {}), mode)

    def _endpoint(self, base: str, headers: dict[str, str]) -> Endpoint:
        from models.evaluation.web import Endpoint

        endpoint = Endpoint(base, headers)
        self._stack.callback(endpoint.close)
        return endpoint


def _check(wanted: Wanted) -> None:
    """Refuses what would be asked for in vain."""
    if wanted.fresh and not wanted.pairs:
        raise CareError("--fresh: only a --pair has another encoder for fresh documents; give one")
    if wanted.weights and not (wanted.hybrid and Fusion.SCORES in wanted.fusions):
        raise CareError("--weight: only hybrids by --fusion scores have one; leave it out")


def _cut(reader: Reader, dim: int) -> CutReader:
    if reader.facts.dim is None or not 0 < dim <= reader.facts.dim:
        raise CareError(f"--dims {dim}: {reader.facts.name} has {reader.facts.dim}")
    return CutReader(reader, dim)


def _fusions(wanted: Wanted) -> Iterable[tuple[Fusion, float | None]]:
    for fusion in wanted.fusions:
        weights = wanted.weights if fusion is Fusion.SCORES else ()
        yield from ((fusion, weight) for weight in weights or (None,))

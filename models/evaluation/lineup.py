"""Builds the systems that an evaluation compares from its options."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from models.encoder.spec import Side
from models.errors import BadEncoder, CareError
from models.evaluation.cache import VectorCache
from models.evaluation.encoders import Address, open_encoder, open_reranker
from models.evaluation.readers import CutReader, EncoderReader, PairReader, Reader, size
from models.evaluation.sets import Task
from models.evaluation.systems import Dense, Hybrid, Lexical, Reranked, System, fresh_systems
from models.fusion import Fusion

if TYPE_CHECKING:
    from models.endpoint import Endpoint
    from models.evaluation.remote import Fusing

VECTORS, RANKINGS, DOCUMENTS = "vectors", "bm25", "hyde"
"""Folders of the cache."""
MODE, MODES = "mode", ("dense", "lexical", "hybrid")
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class LineupOptions:
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
    """Numbers of first dimensions to judge the encoders with, too."""
    rerankers: Sequence[str] = ()
    rerank_depth: int = 20
    fresh: bool = False
    """Judge pairs as they read fresh documents, too."""
    hyde: tuple[str, str] | None = None
    """Address of an endpoint, and its model."""
    hyde_documents: int = 1
    hyde_fusing: Sequence[Fusing] = ("mean",)
    hyde_seeds: int = 1
    hyde_at_once: int = 8

    def __post_init__(self) -> None:
        """Refuses options without effect."""
        if self.fresh and not self.pairs:
            raise CareError("--fresh: only a --pair has another encoder for fresh documents; give one")
        if self.weights and not (self.hybrid and Fusion.SCORES in self.fusions):
            raise CareError("--weight: only hybrids by --fusion scores have one; leave it out")
        for main, given, prefix in (("--reranker", self.rerankers, "rerank_"), ("--hyde", self.hyde, "hyde_")):
            for field in fields(self):
                if not given and field.name.startswith(prefix) and getattr(self, field.name) != field.default:
                    raise CareError(f"--{field.name.replace('_', '-')} has no effect without {main}; give that, too")

    def weights_of(self, fusion: Fusion) -> Sequence[float | None]:
        """Returns the dense side's shares to try in a fusion."""
        return list(dict.fromkeys(self.weights)) if self.weights and fusion is Fusion.SCORES else [None]


class Lineup:
    """The systems, in the order of the table; `dense` are those of whole encoders and pairs.

    Connections are closed with `stack`; `advance` is called with the number of characters that were encoded.
    """

    def __init__(self, options: LineupOptions, cache: Path, stack: ExitStack, advance: Callable[[int], object]) -> None:
        self._cache, self._stack, self._advance = cache, stack, advance
        self._open = functools.cache(open_encoder)
        self._vectors = functools.cache(lambda name, dim: VectorCache(cache / VECTORS / name, dim))
        self._sides: list[tuple[EncoderReader, tuple[Side, ...]]] = []
        readers: list[Reader] = [self._reader(address, tuple(Side)) for address in options.encoders]
        for query, document in options.pairs:
            readers.append(PairReader(self._reader(query, (Side.QUERY,)), self._reader(document, (Side.DOCUMENT,))))
        self.dense = [Dense(reader) for reader in readers]
        self.systems: list[System] = list(self._systems(options))
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
        """Returns how many characters the encoders have yet to read."""
        unread = {
            (reader.encoder.cached_as, text) for reader, sides in self._sides for text in reader.unread(tasks, sides)
        }
        return sum(size(text) for _, text in unread)

    def _reader(self, address: str, sides: tuple[Side, ...]) -> EncoderReader:
        encoder = self._open(address)
        for side in sides:
            if side not in encoder.spec.sides:
                raise BadEncoder(f"{encoder.name} is not made to read a {side}; give it as half of a --pair")
        vectors = self._vectors(*encoder.cached_as)
        reader = EncoderReader(encoder, vectors, self._advance)
        self._sides.append((reader, sides))
        return reader

    def _systems(self, options: LineupOptions) -> Iterator[System]:
        lexical = Lexical(self._cache / RANKINGS)
        if options.bm25:
            yield lexical
        yield from self.dense
        for dense in self.dense:
            for dim in dict.fromkeys(options.dims):
                whole = dense.facts
                if whole.dim is None or not 0 < dim <= whole.dim:
                    raise CareError(f"--dims {dim}: {whole.name} has {whole.dim}")
                yield Dense(CutReader(dense.reader, dim))
        if options.hyde is not None:
            from models.evaluation.remote import Generator, HydeReader  # httpx is slow to import

            address, model = options.hyde
            key = os.environ.get(KEY)
            endpoint = self._endpoint(address, {"authorization": f"Bearer {key}"} if key else {})
            folder, seeds = self._cache / DOCUMENTS, options.hyde_seeds
            writers = [
                Generator(endpoint, model, options.hyde_documents, folder, options.hyde_at_once, seed)
                for seed in range(seeds)
            ]
            for dense, fusing in product(self.dense, dict.fromkeys(options.hyde_fusing)):
                yield from (Dense(HydeReader(dense.reader, writer, fusing, seeds)) for writer in writers)
        for dense in self.dense if options.fresh else ():
            yield from fresh_systems(dense)
        hybrids = [
            Hybrid(dense, lexical, fusion, weight)
            for dense in (self.dense if options.hybrid else ())
            for fusion in dict.fromkeys(options.fusions)
            for weight in options.weights_of(fusion)
        ]
        yield from hybrids
        first: list[System] = [*self.dense, *hybrids]
        for name, reranker in map(open_reranker, options.rerankers):
            yield from (Reranked(each, reranker, name, options.rerank_depth) for each in first)
        yield from map(self._service, options.services)

    def _service(self, text: str) -> System:
        from models.evaluation.remote import Service

        address = Address.parse(text, (MODE,))
        mode = address.options.get(MODE)
        if mode is not None and mode not in MODES:
            raise CareError(f"{MODE}={mode}: choose from {', '.join(MODES)}")
        return Service(self._endpoint(address.place, {}), mode)

    def _endpoint(self, base: str, headers: dict[str, str]) -> Endpoint:
        from models.endpoint import Endpoint

        endpoint = Endpoint(base, headers)
        self._stack.callback(endpoint.close)
        return endpoint

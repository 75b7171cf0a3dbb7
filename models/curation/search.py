"""Searches a corpus for the queries of rows: by encoders, by BM25, or by both fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from models.curation.rows import Row, passages_of, query_of, read_sourced
from models.curation.vectors import STORED, RecordFile, TextEncoder, Vectors
from models.encoder.spec import Side
from models.errors import BadData, CareError
from models.fusion import Fusion, fuse
from models.lexical import LexicalIndex, Ranking
from models.progress import Progress

untyped: Any = faiss  # its stubs lack what Python adds to its classes
AT_ONCE, ADDED = 256, 65536
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Corpus:
    """Different texts in the order of their files, each with its source."""

    texts: list[str]
    sources: list[str]

    @classmethod
    def load(cls, files: Sequence[Path]) -> Corpus:
        """Every document of the files, and every passage of training rows. Memory: the texts."""
        found: dict[str, str] = {}
        for path in files:
            if not path.is_file():
                raise BadData(f"{path}: no such file; --corpus takes JSON lines, plain, .gz or .xz")
            for row in read_sourced([path]):
                if row is not None:
                    for text in (*passages_of(row), *row.get("neg", [])):
                        found.setdefault(text, row["source"])
        if not found:
            raise BadData("--corpus: the files hold no documents")
        return cls(list(found), list(found.values()))

    @cached_property
    def rows(self) -> dict[str, int]:
        return {text: row for row, text in enumerate(self.texts)}

    @cached_property
    def digest(self) -> str:
        state = blake2b(digest_size=8)
        for text in self.texts:
            state.update(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())
        return state.hexdigest()

    def of_source(self, source: str) -> Mask:
        return np.asarray(np.array(self.sources) == source, dtype=np.bool_)


class Dense:
    """Exact search by an encoder. The corpus is read once: its vectors stay in `folder`, under their content's name.

    Memory: 4 bytes a dimension and document.
    """

    def __init__(self, corpus: Corpus, encoder: TextEncoder, folder: Path) -> None:
        self.encoder, dim = encoder, encoder.opened.spec.dim
        file = RecordFile(folder / f"{encoder.fingerprint}-{corpus.digest}.f16", dim, STORED)
        if len(file) != len(corpus.texts):
            with file.locked():
                # A killed run goes on with a whole batch. A file that is too long is not this corpus's.
                file.cut(len(file) // AT_ONCE * AT_ONCE if len(file) < len(corpus.texts) else 0)
                name = f"encode with {encoder.opened.name}"
                with Progress(name, "texts", len(corpus.texts), first=len(file)) as progress:
                    for first in range(len(file), len(corpus.texts), AT_ONCE):
                        some = corpus.texts[first : first + AT_ONCE]
                        file.append(encoder.read(some, Side.DOCUMENT))
                        progress.update(len(some))
        known = file.load()
        self._index = untyped.IndexFlatIP(dim)
        for first in range(0, len(known), ADDED):
            self._index.add(known[first : first + ADDED].astype(np.float32))
        self.vectors: Vectors = untyped.rev_swig_ptr(self._index.get_xb(), len(known) * dim).reshape(-1, dim)

    def ask(self, queries: Sequence[str], imagined: Sequence[Sequence[str]] | None = None) -> Vectors:
        """Vectors of queries; of those with imagined documents, the mean with theirs (SL-HyDE's equation 8)."""
        asked = self.encoder.read(queries, Side.QUERY)
        for at, documents in enumerate(imagined or ()):
            if documents:
                total = asked[at] + self.encoder.read(documents, Side.DOCUMENT).sum(0)
                asked[at] = total / np.linalg.norm(total)
        return asked

    def search(self, asked: Vectors, depth: int, allowed: Mask | None = None) -> list[Ranking]:
        parameters: dict[str, Any] = {}
        if allowed is not None:
            bits = np.packbits(allowed, bitorder="little")
            parameters = {"params": untyped.SearchParameters(sel=untyped.IDSelectorBitmap(bits))}
        scores, rows = self._index.search(asked, min(depth, len(self.vectors)), **parameters)
        return [(found[found >= 0], of[found >= 0]) for found, of in zip(rows, scores, strict=True)]

    def scores(self, asked: Vectors, rows: NDArray[np.int64]) -> Vectors:
        """The cosines of one query's vector with documents."""
        found: Vectors = self.vectors[rows] @ asked
        return found

    def ranks(self, asked: Vectors, row: int) -> list[int]:
        """Returns a document's rank, from 1, for each of these vectors (vectors, dim)."""
        scores = asked @ self.vectors.T
        places: list[int] = (1 + (scores > scores[:, row, None]).sum(1)).tolist()
        return places


@dataclass(frozen=True)
class Retrievers:
    """The systems that search a corpus; opened when they are first used."""

    corpus_files: Sequence[Path]
    encoders: Sequence[TextEncoder]
    bm25: bool
    folder: Path
    """Where the vectors of the corpus are kept."""

    def __post_init__(self) -> None:
        if not self.encoders and not self.bm25:
            raise CareError("nothing searches: give --encoder FOLDER, --bm25 or both")

    def facts(self) -> dict[str, Any]:
        """Returns the corpus digest and the systems, on which the rankings depend."""
        read = [encoder.fingerprint for encoder in self.encoders]
        return {"corpus": self.corpus.digest, "encoders": read, "bm25": self.bm25}

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus.load(self.corpus_files)

    @cached_property
    def dense(self) -> list[Dense]:
        return [Dense(self.corpus, encoder, self.folder) for encoder in self.encoders]

    @cached_property
    def _words(self) -> LexicalIndex:
        return LexicalIndex.build(self.corpus.texts)

    def search(self, rows: Sequence[Row], depth: int, allowed: Mask | None = None) -> list[list[Ranking]]:
        """For each system, the ranking of each row's query."""
        queries = [query_of(row) for row in rows]
        found = []
        for dense in self.dense:
            asked = dense.ask(queries, [row.get("hypothetical", []) for row in rows])
            found.append(dense.search(asked, depth, allowed))
        if self.bm25:
            found.append([self._words.search(query, depth, allowed) for query in queries])
        return found

    def fused(self, rows: Sequence[Row], depth: int, allowed: Mask | None = None) -> list[Ranking]:
        """One ranking for each row: an encoder's, BM25's, or both fused as a hybrid search fuses them."""
        if len(self.encoders) > 1:
            raise CareError("--encoder: one is enough here; several are for `pool`")
        rankings = self.search(rows, depth, allowed)
        if len(rankings) == 1:
            return rankings[0]
        both = zip(rankings[0], rankings[1], strict=True)
        found = [fuse(dense, words, Fusion.SCORES) for dense, words in both]
        return [(places[:depth], scores[:depth]) for places, scores in found]

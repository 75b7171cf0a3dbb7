"""BM25 search: a tantivy index on disk, and scores of a few further texts by that index's statistics.

Chinese runs are cut into single characters and overlapping bigrams: on held-out medical pairs that ranks better than
dictionary segmentation (docs/adr/0003-lexical.md), needs no dictionary and cuts unseen drug names like any other.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

import numpy as np
import tantivy
from numpy.typing import NDArray

from models.errors import CareError

Ranking = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Rows and their scores, best first; equal scores by row."""
Clause = tuple[tantivy.Occur, tantivy.Query]

_TEXT, _ROW, _ANALYSED = "text", "row", "analysed"
# A Chinese run, or a word of letters and digits of any other script (decimal points stay inside numbers).
_RUN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]+|\d+(?:\.\d+)+|[^\W_\u3400-\u9fff\uf900-\ufaff]+")
# Question words are rare in answers, so BM25 would weigh them most, and they are not about the topic. In capitals
# they are kept as acronyms (WHO, DID). "who" is a question word only before a verb; "a" may be a vitamin.
_QUESTION_WORDS = re.compile(
    "请问|想问一下|想知道|为什么|为何(?!首)|什么|怎么样|怎么办|怎么|怎样|咋|如何|哪些|哪个|哪种|哪里|多少(?!见)|是否|是不是|"
    "能不能|可不可以|有没有|要不要|需不需要|"
    r"\b(?![A-Z]{2,}\b)(?i:what|which|how|why|when|where|is|are|do|does|did|can|should|could|the|an|"
    r"who(?=\s+(?:is|are|do|does|did|can|should|could)\b))\b"
)
# Particles are removed only at the end of a clause: elsewhere they are parts of names (吗啡, 吗丁啉). 吧 also ends
# nouns for places (酒吧, 氧吧).
_FINAL_PARTICLES = re.compile(r"(?:[吗呢么啊]|(?<![酒网氧茶书陶贴水咖])吧)+(?!\w)")
# BM25's parameters, which tantivy has built in.
K1, B = 1.2, 0.75
# What a build holds before it writes a part; four times as much was no quicker to search at a million rows.
_WRITER_BYTES = 64_000_000
# A filtered search looks through at most this many hits, or gives tantivy at most this many allowed rows. A row costs
# about as much either way (0.8 µs), so both bound the time of a search, whatever the size of the index.
_MOST_HITS = 10_000
_MOST_ALLOWED = 50_000
_REMOVALS = 100
# From this number of terms on, cutting a text into its terms takes less time than looking for each.
_MANY_TERMS = 250


def terms(text: str) -> list[str]:
    """Returns the index terms of a text or query, in order, repeats kept."""
    found: list[str] = []
    for run in _runs(text):
        if _is_chinese(run):
            found.extend(run)
            found.extend(run[i : i + 2] for i in range(len(run) - 1))
        else:
            found.append(run)
    return found


def count_terms(text: str, wanted: Collection[str]) -> tuple[Counter[str], int]:
    """Counts these terms in a text, and all its terms; for a few terms in a fraction of the time that `terms` takes."""
    if len(wanted) >= _MANY_TERMS:
        every, total = _count_all(text)
        return Counter({term: times for term, times in every.items() if term in wanted}), total
    runs = _runs(text)
    chinese = [run for run in runs if _is_chinese(run)]
    counts = Counter(run for run in runs if run in wanted and not _is_chinese(run))
    joined = " ".join(chinese)
    for term in filter(_is_chinese, wanted):
        # A pair of equal characters overlaps with itself.
        found = len(re.findall(f"(?={term})", joined)) if term[1:] == term[0] else joined.count(term)
        if found:
            counts[term] = found
    return counts, len(runs) + 2 * sum(map(len, chinese)) - 2 * len(chinese)


def _runs(text: str) -> list[str]:
    return _RUN.findall(unicodedata.normalize("NFKC", text).lower())


def _is_chinese(run: str) -> bool:
    return "\u3400" <= run[0] <= "\u9fff" or "\uf900" <= run[0] <= "\ufaff"


def query_terms(query: str) -> list[str]:
    """Returns the terms of a query without its question words; all of its terms if nothing else is left."""
    folded = unicodedata.normalize("NFKC", query)
    return terms(_FINAL_PARTICLES.sub(" ", _QUESTION_WORDS.sub(" ", folded))) or terms(folded)


class LexicalIndex:
    """Read-only BM25 index; safe to search from several threads and processes."""

    def __init__(self, index: tantivy.Index) -> None:
        self._schema = index.schema
        self._searcher = index.searcher()

    @classmethod
    def build(cls, texts: Iterable[str], folder: Path | None = None, rows: Iterable[int] | None = None) -> LexicalIndex:
        """Indexes texts into an empty folder, or in memory without one; their rows ascend, from 0 unless given."""
        schema = (
            tantivy.SchemaBuilder()
            .add_text_field(_TEXT, tokenizer_name=_ANALYSED, index_option="freq")
            .add_integer_field(_ROW, indexed=True, fast=True)
            .build()
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        index = tantivy.Index(schema, path=str(folder) if folder is not None else None, reuse=False)
        analyser = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()
        index.register_tokenizer(_ANALYSED, analyser)
        # One thread keeps rows in order and the build repeatable.
        writer = index.writer(_WRITER_BYTES, 1)
        for row, text in zip(count() if rows is None else rows, texts, strict=rows is not None):
            writer.add_document(tantivy.Document(text=" ".join(terms(text)), row=row))
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        return cls(index)

    @classmethod
    def load(cls, folder: Path) -> LexicalIndex:
        """Opens a folder that `build` wrote; it may be read-only."""
        # tantivy takes a lock file beside the index even to read it; a folder of links takes the lock elsewhere. Once
        # open, the files are mapped and the links are no longer needed.
        links = Path(tempfile.mkdtemp(prefix="care-lexical-"))
        try:
            for file in folder.iterdir():
                if file.suffix != ".lock":
                    (links / file.name).symlink_to(file.resolve())
            try:
                index = tantivy.Index.open(str(links))
            except ValueError as error:
                raise CareError(f"{folder}: not a lexical index: {error}") from error
            index.config_reader("manual")
            return cls(index)
        finally:
            _remove(links)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    @cached_property
    def average_length(self) -> float:
        """Terms of a row on average, as BM25 counts them; 1 if there are none."""
        for term, _ in self._searcher.terms_with_prefix(_TEXT, "", limit=1):
            query = self._term(term, 1)
            (_, address), *_ = self._searcher.search(query, 1, count=False).hits
            # tantivy gives it only in the explanation of a score.
            facts = json.loads(query.explain(self._searcher, address).to_json())
            while not facts["description"].startswith("avgdl"):
                facts = facts["details"][-1]
            return float(facts["value"])
        return 1.0

    def weights(self, query: str) -> dict[str, float]:
        """Returns BM25's weight of each query term: its rarity among the rows, times its count in the query."""
        rows = len(self)
        found = {}
        for term, times in Counter(query_terms(query)).items():
            having = self._searcher.doc_freq(_TEXT, term)
            found[term] = times * (K1 + 1) * math.log(1 + (rows - having + 0.5) / (having + 0.5))
        return found

    def search(self, query: str, k: int, allowed: NDArray[np.bool_] | None = None) -> Ranking:
        """Finds the k best rows that share a term with the query; `allowed` is a boolean array over all rows."""
        wanted = Counter(query_terms(query))
        if not wanted or not len(self) or (allowed is not None and not allowed.any()):
            return np.empty(0, np.int64), np.empty(0, np.float32)
        words = [(tantivy.Occur.Should, self._term(term, times)) for term, times in wanted.items()]
        if allowed is None:
            return self._hits(tantivy.Query.boolean_query(words), k)
        return self._filtered(words, k, allowed)

    def _filtered(self, words: list[Clause], k: int, allowed: NDArray[np.bool_]) -> Ranking:
        """Looks through ever more hits for k allowed rows, until giving tantivy the allowed rows is cheaper.

        The only rows it may miss stand behind _MOST_HITS others, under a filter that allows more than _MOST_ALLOWED.
        """
        permitted = int(np.count_nonzero(allowed))
        enough = k + len(allowed) - permitted  # hits that hold k allowed rows for certain
        most = min(enough, max(_MOST_HITS, 4 * k))
        limit = 2 * k * len(allowed) // permitted
        while limit < permitted or permitted > _MOST_ALLOWED:
            limit = min(limit, most)
            rows, scores = self._hits(tantivy.Query.boolean_query(words), limit)
            keep = allowed[rows]
            complete = np.count_nonzero(keep) >= k or len(rows) < limit or limit == enough
            if complete or (limit == most and permitted > _MOST_ALLOWED):
                return rows[keep][:k], scores[keep][:k]
            limit = 4 * limit if limit < most else permitted
        chosen = tantivy.Query.term_set_query(self._schema, _ROW, np.flatnonzero(allowed).tolist())
        clauses = [*words, (tantivy.Occur.Must, tantivy.Query.const_score_query(chosen, 0.0))]
        return self._hits(tantivy.Query.boolean_query(clauses, minimum_number_should_match=1), k)

    def _term(self, term: str, times: int) -> tantivy.Query:
        query = tantivy.Query.term_query(self._schema, _TEXT, term, index_option="freq")
        return query if times == 1 else tantivy.Query.boost_query(query, float(times))

    def _hits(self, query: tantivy.Query, limit: int) -> Ranking:
        hits = self._searcher.search(query, limit, count=False).hits
        scores = np.array([score for score, _ in hits], dtype=np.float32)
        rows = np.array(self._searcher.fast_field_values(_ROW, [address for _, address in hits]), dtype=np.int64)
        order = np.lexsort((rows, -scores))
        return rows[order], scores[order]


def _remove(folder: Path) -> None:
    """Removes a folder in which tantivy's watching thread may still be taking and leaving its lock."""
    for _ in range(_REMOVALS):
        try:
            return shutil.rmtree(folder)
        except OSError:
            time.sleep(0.01)
    # A left-over folder of links costs nothing; failing to open a sound index would.
    shutil.rmtree(folder, ignore_errors=True)


Scores = NDArray[np.float32]
# Lengths up to here are kept as they are, longer ones to four binary digits, as the large index keeps them.
EXACT_LENGTHS = 24
LENGTH_BITS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Postings:
    """BM25 over a few texts in memory, scored by the rarities and lengths of a large index, so that both rank together.

    Three arrays of one length, ascending by the term's hash, and each row's length. The hashes are the interpreter's.
    """

    hashes: NDArray[np.int64]
    rows: NDArray[np.int32]
    counts: Scores
    lengths: Scores

    @classmethod
    def of(cls, texts: Sequence[str], wanted: Collection[str] | None = None) -> Postings:
        """`wanted` are the only terms that will be scored; None: any."""
        counted = [count_terms(text, wanted) if wanted is not None else _count_all(text) for text in texts]
        found = [counts for counts, _ in counted]
        sizes = [len(counts) for counts in found]
        hashes = np.fromiter((hash(term) for counts in found for term in counts), np.int64, sum(sizes))
        counts = np.fromiter((count for counts in found for count in counts.values()), np.float32, sum(sizes))
        lengths = np.array([rounded_length(length) for _, length in counted], np.float32)
        return cls._sorted(hashes, np.repeat(np.arange(len(texts), dtype=np.int32), sizes), counts, lengths)

    @classmethod
    def joined(cls, parts: Sequence[Postings], kept: Sequence[NDArray[np.bool_]]) -> Postings:
        """Returns the kept rows of all parts, one after the other; `kept` is a boolean array over the rows of each."""
        numbers = [np.cumsum(mask) - 1 for mask in kept]
        starts = np.cumsum([0, *(np.count_nonzero(mask) for mask in kept)])
        entries = [mask[part.rows] for part, mask in zip(parts, kept, strict=True)]
        rows = [
            (number[part.rows[own]] + start).astype(np.int32)
            for part, number, own, start in zip(parts, numbers, entries, starts.tolist(), strict=False)
        ]
        return cls._sorted(
            np.concatenate([part.hashes[own] for part, own in zip(parts, entries, strict=True)]),
            np.concatenate(rows),
            np.concatenate([part.counts[own] for part, own in zip(parts, entries, strict=True)]),
            np.concatenate([part.lengths[mask] for part, mask in zip(parts, kept, strict=True)]),
        )

    @classmethod
    def _sorted(cls, hashes: NDArray[np.int64], rows: NDArray[np.int32], counts: Scores, lengths: Scores) -> Postings:
        order = np.argsort(hashes, kind="stable")  # parts are sorted already, which this kind makes use of
        return cls(hashes[order], rows[order], counts[order], lengths)

    def score(self, weights: dict[str, float], among: LexicalIndex) -> Scores:
        """Returns the score of every row for a query of these weights, 0 if it shares no term, as a row of `among`."""
        wanted = np.array([hash(term) for term in weights], np.int64)
        first, end = (np.searchsorted(self.hashes, wanted, side) for side in ("left", "right"))
        sizes = end - first
        # The entries of all terms at once: a handful of array operations, however many terms there are.
        entries = np.arange(sizes.sum()) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        rows, counts = self.rows[entries], self.counts[entries]
        damping = K1 * (1 - B + B * self.lengths[rows] / np.float32(among.average_length))
        shares = np.repeat(np.array(list(weights.values()), np.float32), sizes) * counts / (counts + damping)
        return np.bincount(rows, shares, len(self.lengths)).astype(np.float32)


def _count_all(text: str) -> tuple[Counter[str], int]:
    counts = Counter(terms(text))
    return counts, counts.total()


def rounded_length(length: int) -> int:
    """Returns a length as the large index keeps it, in one byte."""
    rest = length - EXACT_LENGTHS
    if rest < 0:
        return length
    shift = max(0, rest.bit_length() - LENGTH_BITS)
    return EXACT_LENGTHS + (rest >> shift << shift)

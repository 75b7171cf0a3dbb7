"""How many examples a stage's files hold, and how long their texts are, by a sample. Loads no tokenizer, no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from models.training.recipe import Data, Diversify, Filter, Mine, Recipe
from models.training.rows import Pair, as_pairs, as_texts, count_units, sample

SAMPLE = 2000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Examples (pairs, or texts), and the mean length of what is read of a query and of a document, in tokens."""

    examples: int
    query: float
    document: float


@lru_cache
def _sampled(files: tuple[Path, ...], seed: int) -> tuple[int, list[Pair]]:
    """Stages share files: each is gone through once."""
    return sample(files, SAMPLE, seed)


def sizes_of(recipe: Recipe, data: Data, query_longest: int, document_longest: int) -> Sizes | None:
    """None where a file is not there. Texts that come twice are counted twice, rows that a stage makes of others as
    those that it is given."""
    files, seed = tuple(Path(file) for name in data.files for file in _given(recipe, name)), recipe.seed
    if not all(path.is_file() for path in files):
        return None
    rows, drawn = _sampled(files, seed)
    if data.view == "texts":
        texts = list(as_texts(drawn, data.crops, seed, sentences=data.sentences))
        pairs = [(source, text, text) for text, source in texts]
    else:
        pairs = [(pair.source, pair.query, pair.positives[0]) for pair in as_pairs(drawn, data.crops, seed)]
    return Sizes(
        round(rows * len(pairs) / max(1, len(drawn))),
        _mean(((source, min(query_longest, count_units(text))) for source, text, _ in pairs), data.weights),
        _mean(((source, min(document_longest, count_units(text))) for source, _, text in pairs), data.weights),
    )


def _given(recipe: Recipe, file: str) -> list[str]:
    """The files that a file is made of: itself, or what the stage is given that makes it."""
    if not file.startswith("@"):
        return [file]
    maker = recipe.stages[file[1:]]
    assert isinstance(maker, Mine | Filter | Diversify)
    return [given for name in maker.files for given in _given(recipe, name)]


def _mean(lengths: Iterable[tuple[str, int]], weights: Mapping[str, float]) -> float:
    """As batches are drawn: by the sources' weights, or else every example alike."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for source, length in lengths:
        by_source[source].append(length)
    shares = {
        source: weights.get(source, weights.get("*", 1.0)) if weights else len(found)
        for source, found in by_source.items()
    }
    total = sum(share * sum(by_source[source]) / len(by_source[source]) for source, share in shares.items())
    return max(1.0, total / (sum(shares.values()) or 1.0))

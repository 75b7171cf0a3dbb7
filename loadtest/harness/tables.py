"""Many measurements to a few figures, and figures to Markdown: what every report here is written with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of each round: the median and the extremes."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def text(self, form: str) -> str:
        return f"{self.median:{form}} ({self.lowest:{form}}–{self.highest:{form}})"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile of all requests of all rounds."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        return cls(median(values), percentile(values, 0.99))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def pooled(lists: Iterable[Sequence[float]]) -> list[float]:
    return [value for values in lists for value in values]


def fact_lines(facts: Mapping[str, str]) -> Iterator[str]:
    yield from (f"- {name}: {value}" for name, value in facts.items())
    yield ""


def heading(first: str, *others: str) -> Iterator[str]:
    """A table's first two lines: text to the left in the first column, figures to the right in the others."""
    yield line(first, *others)
    yield "|---" + "|---:" * len(others) + "|"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def failures_text(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{number} × {reason}" for reason, number in failures.items()) or "0"

"""Formats results as the papers do: a row per system, a column per set, averages per kind and per benchmark.

Laid out as values, then written as text for a terminal.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from models.evaluation.results import Run, SetResult
from models.evaluation.significance import ALPHA, MIN_QUERIES, Mark, Marks, averages

WIDTH = 120
GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One set, or the average of several."""

    title: str
    subtitle: str
    """The metric of a set, or which sets an average is of."""
    sets: tuple[str, ...]

    @property
    def is_average(self) -> bool:
        return len(self.sets) > 1


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in percent, if the system has one, and how it compares with the baseline's."""

    value: float | None
    mark: Mark | None = None
    best: bool = False

    @property
    def text(self) -> str:
        return "–" if self.value is None else f"{self.value:.2f}"

    @property
    def symbol(self) -> str:
        return self.mark.symbol if self.mark else ""


@dataclass(frozen=True, slots=True)
class Table:
    """One benchmark: a row of cells for each system, in the order of the columns."""

    benchmark: str
    columns: list[Column]
    rows: dict[str, list[Cell]]


def tables(run: Run, marks: Marks | None = None) -> list[Table]:
    """One table for each benchmark of the run, in the order in which they were judged."""
    names = dict.fromkeys(result.benchmark for result in run.results)
    return [_table(name, [r for r in run.results if r.benchmark == name], marks or {}) for name in names]


def legend(marks: Marks) -> str:
    """Returns what the marks mean, in one sentence; empty without marks."""
    baseline = next((mark.baseline for mark in marks.values()), None)
    if baseline is None:
        return ""
    return (
        f"↑ ↓ better or worse than {baseline} beyond chance: paired bootstrap over the queries of a set, or of every"
        f" set of an average, p < {ALPHA} after Holm's correction within the table; sets of fewer than {MIN_QUERIES}"
        " queries are not tested."
    )


def explain(mark: Mark) -> str:
    """Returns the difference from the baseline, its interval and its p value."""
    against = f"{mark.difference:+.2f} against {mark.baseline}"
    if mark.p is None:
        return against
    t_test = "" if mark.t_test is None else f", t-test p {mark.t_test:.4f} (not corrected)"
    return f"{against}, 95 % between {mark.low:+.2f} and {mark.high:+.2f}, p {mark.p:.4f} (corrected){t_test}"


def text(run: Run, marks: Marks | None = None, width: int = WIDTH) -> str:
    """Returns all tables for a terminal; one that is wider is continued below with its systems named again."""
    parts = [_block(table, columns) for table in tables(run, marks) for columns in _fitting(table, width)]
    average_notes = [
        f"{benchmark}, average of {', '.join(sets)}: {system} {explain(mark)}"
        for (benchmark, sets, system), mark in (marks or {}).items()
        if len(sets) > 1
    ]
    missing = [f"not judged: {name} ({how})" for name, how in run.missing.items()]
    groups = [
        "\n".join(textwrap.fill(note, width, break_long_words=False, break_on_hyphens=False) for note in notes)
        for notes in ([legend(marks or {})], average_notes, missing)
    ]
    return "\n\n".join(part for part in (*parts, *groups) if part)


def _table(benchmark: str, results: Sequence[SetResult], marks: Marks) -> Table:
    found = {(result.set_name, result.system): result for result in results}
    columns = _columns(results)
    rows: dict[str, list[Cell]] = {}
    for system in dict.fromkeys(result.system for result in results):
        rows[system] = []
        for column in columns:
            values = [found[name, system].value for name in column.sets if (name, system) in found]
            # An average over some of the sets would stand beside averages over all of them as if it were one.
            value = sum(values) / len(values) if len(values) == len(column.sets) else None
            rows[system].append(Cell(value, marks.get((benchmark, column.sets, system))))
    # The best of each column are all of those that print alike; a single figure is not marked.
    for place in range(len(columns)):
        shown = [row[place].text for row in rows.values() if row[place].value is not None]
        best = max(shown, key=float) if len(shown) > 1 else None
        for row in rows.values():
            row[place] = replace(row[place], best=row[place].text == best)
    return Table(benchmark, columns, rows)


def _columns(results: Sequence[SetResult]) -> list[Column]:
    """Sets grouped by kind in order of appearance; a kind of several sets has an average, and so have several kinds."""
    firsts = {result.set_name: result for result in reversed(results)}
    kinds = dict.fromkeys(result.kind for result in results)
    groups = averages(results)
    columns: list[Column] = []
    for kind in kinds:
        names = tuple(dict.fromkeys(result.set_name for result in results if result.kind is kind))
        columns += [Column(name, firsts[name].main_metric, (name,)) for name in names]
        if names in groups:
            metrics = {firsts[name].main_metric for name in names}
            columns.append(Column("average", kind if len(kinds) > 1 or len(metrics) > 1 else metrics.pop(), names))
    if len(kinds) > 1:
        columns.append(Column("average", "all", groups[-1]))
    return columns


def _fitting(table: Table, width: int) -> Iterable[list[int]]:
    """Places of the columns, in as many groups as it takes for each to fit."""
    room = width - _system_width(table)
    group: list[int] = []
    used = 0
    for place in range(len(table.columns)):
        needed = len(GAP) + _column_width(table, place)
        if group and used + needed > room:
            yield group
            group, used = [], 0
        group.append(place)
        used += needed
    yield group


def _block(table: Table, places: Sequence[int]) -> str:
    """Some columns of a table: two lines of heads, a line for each system; marks stand behind the figures."""
    systems = _system_width(table)
    widths = [_column_width(table, place) for place in places]

    def line(first: str, cells: Iterable[str]) -> str:
        padded = (" " * (width - display_width(cell)) + cell for cell, width in zip(cells, widths, strict=True))
        return GAP.join((first + " " * (systems - display_width(first)), *padded)).rstrip()

    lines = [
        line(table.benchmark, (f"{table.columns[place].title} " for place in places)),
        line("", (f"{table.columns[place].subtitle} " for place in places)),
        "─" * (systems + sum(widths) + len(GAP) * len(widths)),
    ]
    for system, row in table.rows.items():
        lines.append(line(system, (f"{row[place].text}{row[place].symbol or ' '}" for place in places)))
    return "\n".join(lines)


def _system_width(table: Table) -> int:
    return max(display_width(name) for name in (table.benchmark, *table.rows))


def _column_width(table: Table, place: int) -> int:
    column = table.columns[place]
    figures = (row[place].text for row in table.rows.values())
    return 1 + max(display_width(text) for text in (column.title, column.subtitle, *figures))


def display_width(text: str) -> int:
    """Columns of a terminal that a text takes: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)

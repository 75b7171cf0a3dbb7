"""Draws a run: quality against speed and by set, dimensions, indexes, similarities; each with title and caption.

Imports matplotlib: import this module only where pictures are drawn.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from models.evaluation import studies
from models.evaluation.report import drawing
from models.evaluation.results import Curve, Run, SetResult
from models.evaluation.sets import Kind

SPEED, TASKS = "speed", "sets"
WORDS = Path(__file__).with_suffix(".toml")
INDEX_PLACES = {studies.FLAT: 6, studies.HNSW: 0, studies.IVF: 1}
"""Colour and shape of each index."""
OUTER: tuple[drawing.Place, ...] = (drawing.ABOVE, drawing.UPPER_RIGHT, drawing.RIGHT)
INNER: tuple[drawing.Place, ...] = (drawing.LOWER_LEFT, drawing.BELOW, drawing.LEFT)
SETTING_PLACES = {studies.FLAT: OUTER, studies.HNSW: OUTER, studies.IVF: INNER}
SIMILARITY_COLOURS = {
    studies.RANDOM_NEGATIVES: drawing.SERIES[6],
    studies.HARD_NEGATIVES: drawing.SERIES[1],
    studies.POSITIVES: drawing.SERIES[0],
}
SIMILARITY_HEIGHT, SIMILARITY_WIDTH, SIMILARITY_FRAME = 0.9, 1.7, 0.7
"""Inches of one panel, and of what stands above the first and below the last."""


def dimensions(curves: Sequence[Curve], places: dict[str, int]) -> Figure:
    """Draws the quality of vectors cut off after some dimensions: one panel per set, one line per encoder."""
    sets: dict[str, list[Curve]] = {}
    for curve in curves:
        sets.setdefault(curve.set_name, []).append(curve)
    figure, axes = drawing.some_panels(len(sets))
    for panel, (set_name, lines) in zip(axes, sets.items(), strict=True):
        panel.set_title(drawing.drawable(set_name))
        for curve in lines:
            place = places[curve.system]
            panel.plot(*_columns(curve), color=drawing.colour(place), marker=drawing.marker(place))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(sorted({x for curve in lines for x, _ in curve.points})))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        panel.margins(y=0.12)
        panel.set(xlabel=lines[0].x_label, ylabel=lines[0].y_label)
    systems = dict.fromkeys(curve.system for curve in curves)
    drawing.legend(figure, [drawing.line_entry(system, places[system]) for system in systems])
    return figure


def indexes(curves: Sequence[Curve]) -> Figure:
    """Draws one panel per set and encoder, one line per index, one point per setting."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.set_name, curve.system), []).append(curve)
    figure, axes = drawing.some_panels(len(groups))
    for panel, (names, lines) in zip(axes, groups.items(), strict=True):
        panel.set_title("\n".join(map(drawing.drawable, names)))
        for curve in lines:
            place = INDEX_PLACES[curve.line]
            panel.plot(*_columns(curve), color=drawing.colour(place), marker=drawing.marker(place))
        drawing.speed_axis(panel)
        panel.margins(0.12, 0.25)
        panel.set(xlabel=lines[0].x_label, ylabel=lines[0].y_label)
    drawing.legend(figure, [drawing.line_entry(line, place) for line, place in INDEX_PLACES.items()])
    for panel, lines in zip(axes, groups.values(), strict=True):
        labels = [
            drawing.Label(x, y, text, drawing.SOFT, SETTING_PLACES[curve.line])
            for curve in lines
            for (x, y), text in zip(curve.points, curve.labels, strict=True)
            if text
        ]
        drawing.place_labels(figure, panel, labels, size=drawing.SIZE - 1.5)
    return figure


def similarities(curves: Sequence[Curve]) -> Figure:
    """Draws the cosines of answers, hardest others and random others: one row per set, one column per encoder."""
    sets, systems = (
        list(dict.fromkeys(names)) for names in zip(*((c.set_name, c.system) for c in curves), strict=True)
    )
    height = SIMILARITY_HEIGHT + SIMILARITY_FRAME / len(sets)
    figure, rows = drawing.panels(len(sets), len(systems), height, max(drawing.WIDTH, SIMILARITY_WIDTH * len(systems)))
    for set_name, row in zip(sets, rows, strict=True):
        for system, panel in zip(systems, row, strict=True):
            for curve in (c for c in curves if (c.set_name, c.system) == (set_name, system)):
                x, y = _columns(curve)
                colour = SIMILARITY_COLOURS[curve.line]
                panel.fill_between(x, y, color=colour, alpha=0.28, linewidth=0)
                panel.plot(x, y, color=colour, linewidth=1.3)
            panel.sharex(rows[0][0])
            panel.set_ylim(bottom=0)
            panel.set_yticks([])
            panel.label_outer()
            panel.grid(visible=False, axis="y")
        row[0].set_ylabel(drawing.drawable(set_name), color=drawing.INK)
    for system, panel in zip(systems, rows[0], strict=True):
        panel.set_title(drawing.drawable(system))
    for panel in rows[-1]:
        panel.set_xlabel(curves[0].x_label)
    drawing.legend(figure, [drawing.area_entry(line, colour) for line, colour in reversed(SIMILARITY_COLOURS.items())])
    return figure


def _columns(curve: Curve) -> list[tuple[float, ...]]:
    return list(zip(*curve.points, strict=True))


BAR, GAP = 0.135, 1.3
"""Inches of one bar, and the bars that would fit between two groups."""


def speed(run: Run, places: dict[str, int]) -> Figure | None:
    """Draws a panel per benchmark: the mean over its retrieval sets against queries per second, a point per system.

    A system that was not judged or not timed on one of the sets has no mean that compares, and is left out.
    """
    retrieval = [result for result in run.results if result.kind is Kind.RETRIEVAL]
    names = dict.fromkeys(result.benchmark for result in retrieval)
    found = {name: _speeds([result for result in retrieval if result.benchmark == name]) for name in names}
    found = {name: points for name, points in found.items() if points}
    if not found:
        return None
    metrics = {result.main_metric for result in retrieval}
    sizes = {facts.name: facts.parameters for facts in run.systems}
    figure, axes = drawing.some_panels(len(found))
    for panel, (name, points) in zip(axes, found.items(), strict=True):
        if len(found) > 1:
            panel.set_title(drawing.drawable(name))
        front = _front(list(points.values()))
        panel.plot(*zip(*front, strict=True), color=drawing.SOFT, linestyle=(0, (3, 3)), linewidth=1, zorder=1)
        for system, (x, y) in points.items():
            place = places[system]
            panel.plot(x, y, marker=drawing.marker(place), color=drawing.colour(place), markersize=9, linestyle="none")
        drawing.speed_axis(panel)
        panel.margins(0.18, 0.16)
        panel.set(xlabel="queries per second, one at a time", ylabel=f"mean {' or '.join(sorted(metrics))}")
    for panel, points in zip(axes, found.values(), strict=True):
        labels = {}
        for system, point in points.items():
            size = sizes.get(system)
            text = f"{system}, {drawing.short_number(size)} parameters" if size else system
            labels[system] = drawing.Label(*point, text, drawing.INK)
        left_out = drawing.place_labels(figure, panel, list(labels.values()))
        others = [(label.text, places[system]) for system, label in labels.items() if label in left_out]
        if others:
            panel.legend(handles=[drawing.line_entry(*each) for each in others], loc="best")
    return figure


def tasks(run: Run, places: dict[str, int]) -> Figure:
    """Draws bars of the metric that the papers print: one group per set, one bar per system."""
    groups: dict[tuple[str, str], list[SetResult]] = {}
    for result in run.results:
        groups.setdefault((result.benchmark, result.set_name), []).append(result)
    rows = sum(len(group) + GAP for group in groups.values())
    figure, [[axes]] = drawing.panels(1, 1, BAR * rows + 0.6)
    ticks, names, bottom = [], [], 0.0
    for (_, set_name), group in groups.items():
        places_of_bars = bottom + np.arange(len(group))
        values = [result.value for result in group]
        bars = axes.barh(
            places_of_bars, values, height=0.84, color=[drawing.colour(places[result.system]) for result in group]
        )
        texts = axes.bar_label(bars, fmt="{:.1f}", padding=3, size=drawing.SIZE - 2, color=drawing.SOFT)
        texts[int(np.argmax(values))].set(color=drawing.INK, weight="bold")
        ticks.append(float(places_of_bars.mean()))
        names.append(f"{drawing.drawable(set_name)}\n{group[0].main_metric}")
        bottom += len(group) + GAP
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", labelcolor=drawing.INK)
    axes.set_ylim(bottom - GAP, -1)
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    systems = dict.fromkeys(result.system for result in run.results)
    drawing.legend(figure, [drawing.area_entry(system, drawing.colour(places[system])) for system in systems])
    return figure


def _speeds(results: Sequence[SetResult]) -> dict[str, tuple[float, float]]:
    """(queries per second, mean of the main metric) of each system that has both on every set."""
    sets = {result.set_name for result in results}
    points = {}
    for system in dict.fromkeys(result.system for result in results):
        own = [result for result in results if result.system == system]
        seconds = [1 / result.queries_per_second for result in own if result.queries_per_second]
        if len(seconds) == len(sets):
            points[system] = (1 / float(np.mean(seconds)), float(np.mean([result.value for result in own])))
    return points


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points than which none is both faster and better, the slowest first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, the name of its files, and the words around it."""

    name: str
    title: str
    caption: str
    figure: Figure


def draw(run: Run) -> list[Picture]:
    """Returns every picture that the run has data for; a system has one colour and shape in all of them."""
    named = (*(result.system for result in run.results), *(curve.system for curve in run.curves))
    places = {system: place for place, system in enumerate(dict.fromkeys(named))}
    curves: dict[str, list[Curve]] = {}
    for curve in run.curves:
        curves.setdefault(curve.study, []).append(curve)
    with drawing.applied():
        drawn = {SPEED: speed(run, places), TASKS: tasks(run, places) if run.results else None}
        if found := curves.get(studies.DIMENSIONS):
            drawn[studies.DIMENSIONS] = dimensions(found, places)
        if found := curves.get(studies.INDEXES):
            drawn[studies.INDEXES] = indexes(found)
        if found := curves.get(studies.SIMILARITIES):
            drawn[studies.SIMILARITIES] = similarities(found)
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    return [Picture(name, figure=figure, **words[name]) for name, figure in drawn.items() if figure is not None]

"""Pictures of a run's figures: quality against speed, and quality on each set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from models.evaluation.report import theme
from models.evaluation.report.drawing import (
    Label,
    area_entry,
    legend,
    line_entry,
    panels,
    place_labels,
    short_number,
    some_panels,
    speed_axis,
)
from models.evaluation.results import Run, SetResult
from models.evaluation.sets import Kind

BAR, GAP = 0.135, 1.3
"""Inches of one bar, and the bars that would fit between two groups."""


def speed(run: Run, places: dict[str, int]) -> Figure | None:
    """A panel for each benchmark: the mean over its retrieval sets against queries per second, a point a system.

    A system that was not judged or not timed on one of the sets has no mean that compares, and is left out.
    """
    retrieval = [result for result in run.results if result.kind is Kind.RETRIEVAL]
    names = dict.fromkeys(result.benchmark for result in retrieval)
    found = {name: _speeds([result for result in retrieval if result.benchmark == name]) for name in names}
    found = {name: points for name, points in found.items() if points}
    if not found:
        return None
    metrics = {result.main_metric for result in retrieval}
    figure, axes = some_panels(len(found))
    for panel, (name, points) in zip(axes, found.items(), strict=True):
        if len(found) > 1:
            panel.set_title(theme.drawable(name))
        front = _front(list(points.values()))
        panel.plot(*zip(*front, strict=True), color=theme.SOFT, linestyle=(0, (3, 3)), linewidth=1, zorder=1)
        for system, (x, y) in points.items():
            place = places[system]
            panel.plot(x, y, marker=theme.marker(place), color=theme.colour(place), markersize=9, linestyle="none")
        speed_axis(panel)
        panel.margins(0.18, 0.16)
        panel.set_xlabel("queries per second, one at a time")
        panel.set_ylabel(f"mean {' or '.join(sorted(metrics))}")
    for panel, points in zip(axes, found.values(), strict=True):
        labels = {system: Label(*points[system], _sized(system, run), theme.INK) for system in points}
        left_out = place_labels(figure, panel, list(labels.values()))
        entries = [line_entry(label.text, places[system]) for system, label in labels.items() if label in left_out]
        if entries:
            panel.legend(handles=entries, loc="best")
    return figure


def _sized(system: str, run: Run) -> str:
    """A system's name, and its parameters where they are known."""
    size = next((facts.parameters for facts in run.systems if facts.name == system), None)
    return f"{system}, {short_number(size)} parameters" if size else system


def tasks(run: Run, places: dict[str, int]) -> Figure:
    """Bars of the figure that the papers print: a group a set, a bar a system."""
    groups: dict[tuple[str, str], list[SetResult]] = {}
    for result in run.results:
        groups.setdefault((result.benchmark, result.set_name), []).append(result)
    rows = sum(len(group) + GAP for group in groups.values())
    figure, [[axes]] = panels(1, 1, BAR * rows + 0.6)
    ticks, names, bottom = [], [], 0.0
    for (_, set_name), group in groups.items():
        places_of_bars = bottom + np.arange(len(group))
        values = [result.value for result in group]
        bars = axes.barh(
            places_of_bars, values, height=0.84, color=[theme.colour(places[result.system]) for result in group]
        )
        texts = axes.bar_label(bars, fmt="{:.1f}", padding=3, size=theme.SIZE - 2, color=theme.SOFT)
        texts[int(np.argmax(values))].set(color=theme.INK, weight="bold")
        ticks.append(float(places_of_bars.mean()))
        names.append(f"{theme.drawable(set_name)}\n{group[0].main_metric}")
        bottom += len(group) + GAP
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", labelcolor=theme.INK)
    axes.set_ylim(bottom - GAP, -1)
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    systems = dict.fromkeys(result.system for result in run.results)
    legend(figure, [area_entry(system, theme.colour(places[system])) for system in systems])
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
    """The points than which none is both faster and better, the slowest first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]

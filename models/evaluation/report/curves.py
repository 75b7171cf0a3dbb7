"""Pictures of the studies: a panel a set (and encoder), a line a curve."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from models.evaluation.report import theme
from models.evaluation.report.drawing import (
    ABOVE,
    BELOW,
    LEFT,
    LOWER_LEFT,
    RIGHT,
    UPPER_RIGHT,
    WIDTH,
    Label,
    Place,
    area_entry,
    legend,
    line_entry,
    panels,
    place_labels,
    some_panels,
    speed_axis,
)
from models.evaluation.results import Curve
from models.evaluation.studies import FLAT, HARD_NEGATIVES, HNSW, IVF, POSITIVES, RANDOM_NEGATIVES

INDEX_PLACES = {FLAT: 6, HNSW: 0, IVF: 1}
"""Colour and shape of each index."""
OUTER: tuple[Place, ...] = (ABOVE, UPPER_RIGHT, RIGHT)
INNER: tuple[Place, ...] = (LOWER_LEFT, BELOW, LEFT)
SETTING_PLACES = {FLAT: OUTER, HNSW: OUTER, IVF: INNER}
SIMILARITY_COLOURS = {RANDOM_NEGATIVES: theme.SERIES[6], HARD_NEGATIVES: theme.SERIES[1], POSITIVES: theme.SERIES[0]}
SIMILARITY_HEIGHT, SIMILARITY_WIDTH, SIMILARITY_FRAME = 0.9, 1.7, 0.7
"""Inches of one panel, and of what stands above the first and below the last."""


def dimensions(curves: Sequence[Curve], places: dict[str, int]) -> Figure:
    """A panel a set, a line an encoder: quality of vectors cut off after so many dimensions."""
    sets: dict[str, list[Curve]] = {}
    for curve in curves:
        sets.setdefault(curve.set_name, []).append(curve)
    figure, axes = some_panels(len(sets))
    for panel, (set_name, lines) in zip(axes, sets.items(), strict=True):
        panel.set_title(theme.drawable(set_name))
        for curve in lines:
            place = places[curve.system]
            panel.plot(*_columns(curve), color=theme.colour(place), marker=theme.marker(place))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(sorted({x for curve in lines for x, _ in curve.points})))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        panel.margins(y=0.12)
        _name_axes(panel, lines[0])
    legend(figure, [line_entry(system, places[system]) for system in dict.fromkeys(curve.system for curve in curves)])
    return figure


def indexes(curves: Sequence[Curve]) -> Figure:
    """A panel a set and encoder, a line an index, a point a setting."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.set_name, curve.system), []).append(curve)
    figure, axes = some_panels(len(groups))
    for panel, (names, lines) in zip(axes, groups.items(), strict=True):
        panel.set_title("\n".join(map(theme.drawable, names)))
        for curve in lines:
            place = INDEX_PLACES[curve.line]
            panel.plot(*_columns(curve), color=theme.colour(place), marker=theme.marker(place))
        speed_axis(panel)
        panel.margins(0.12, 0.25)
        _name_axes(panel, lines[0])
    legend(figure, [line_entry(line, place) for line, place in INDEX_PLACES.items()])
    for panel, lines in zip(axes, groups.values(), strict=True):
        place_labels(figure, panel, [label for curve in lines for label in _settings(curve)], size=theme.SIZE - 1.5)
    return figure


def _settings(curve: Curve) -> list[Label]:
    places = SETTING_PLACES[curve.line]
    named = zip(curve.points, curve.labels, strict=True)
    return [Label(x, y, text, theme.SOFT, places) for (x, y), text in named if text]


def similarities(curves: Sequence[Curve]) -> Figure:
    """A row a set, a column an encoder: where the cosines of answers, hardest others and random others lie."""
    sets, systems = (
        list(dict.fromkeys(names)) for names in zip(*((c.set_name, c.system) for c in curves), strict=True)
    )
    height = SIMILARITY_HEIGHT + SIMILARITY_FRAME / len(sets)
    figure, rows = panels(len(sets), len(systems), height, max(WIDTH, SIMILARITY_WIDTH * len(systems)))
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
        row[0].set_ylabel(theme.drawable(set_name), color=theme.INK)
    for system, panel in zip(systems, rows[0], strict=True):
        panel.set_title(theme.drawable(system))
    for panel in rows[-1]:
        panel.set_xlabel(curves[0].x_label)
    legend(figure, [area_entry(line, colour) for line, colour in reversed(SIMILARITY_COLOURS.items())])
    return figure


def _columns(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve.points], [y for _, y in curve.points]


def _name_axes(panel: Axes, curve: Curve) -> None:
    panel.set_xlabel(curve.x_label)
    panel.set_ylabel(curve.y_label)

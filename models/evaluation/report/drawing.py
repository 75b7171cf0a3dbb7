"""Parts that several pictures share: panels, legends, and labels beside points that cover nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from models.evaluation.report import theme

WIDTH = 5.2
SINGLE_HEIGHT, PANEL_HEIGHT = 3.3, 2.1
"""Inches. Each picture is about as wide as a column of text, so that it needs no shrinking."""
LABEL_SIZE = 8.0
LEGEND_ROW, LEGEND_HANDLE, LEGEND_LETTER = 0.19, 0.5, 0.066
WIDE_STEPS, NARROW_STEPS = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
POINT_REACH, LINE_REACH = 4.0, 1.5
"""How far labels keep from points and from the lines between them, in points."""

Place = tuple[float, float, str, str]
RIGHT: Place = (8, 0, "left", "center")
LEFT: Place = (-8, 0, "right", "center")
ABOVE: Place = (0, 6, "center", "bottom")
BELOW: Place = (0, -6, "center", "top")
UPPER_RIGHT: Place = (6, 5, "left", "bottom")
LOWER_RIGHT: Place = (6, -5, "left", "top")
UPPER_LEFT: Place = (-6, 5, "right", "bottom")
LOWER_LEFT: Place = (-6, -5, "right", "top")
ANYWHERE = (RIGHT, LEFT, ABOVE, BELOW, UPPER_RIGHT, LOWER_RIGHT, UPPER_LEFT, LOWER_LEFT)


@dataclass(frozen=True, slots=True)
class Label:
    """A text that belongs to a point of the data, and where it may stand, best first."""

    x: float
    y: float
    text: str
    colour: str
    places: tuple[Place, ...] = ANYWHERE


def panels(down: int, abreast: int, height: float, width: float = WIDTH) -> tuple[Figure, list[list[Axes]]]:
    """A figure of rows of panels, each so many inches high."""
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(width, height * down), layout=layout)
    FigureCanvasAgg(figure)
    return figure, [list(row) for row in figure.subplots(down, abreast, squeeze=False)]


def some_panels(count: int) -> tuple[Figure, list[Axes]]:
    """One large panel, or small ones two by two."""
    if count == 1:
        figure, rows = panels(1, 1, SINGLE_HEIGHT)
    else:
        figure, rows = panels(-(-count // 2), 2, PANEL_HEIGHT)
    axes = [one for row in rows for one in row]
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def line_entry(name: str, place: int) -> Artist:
    colour, marker = theme.colour(place), theme.marker(place)
    return Line2D([], [], color=colour, marker=marker, markeredgewidth=0, label=theme.drawable(name))


def area_entry(name: str, colour: str) -> Artist:
    return Patch(color=colour, linewidth=0, label=theme.drawable(name))


def legend(figure: Figure, entries: Sequence[Artist]) -> None:
    """Above the panels, in as many columns as fit; the figure grows by it."""
    names = [str(entry.get_label()) for entry in entries]
    columns = next(n for n in range(len(names), 0, -1) if n == 1 or _legend_width(names, n) <= figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * -(-len(names) // columns))
    figure.legend(handles=list(entries), loc="outside upper left", ncols=columns)


def _legend_width(names: Sequence[str], columns: int) -> float:
    """About how many inches a legend takes whose names are dealt to the columns as matplotlib does."""
    longest = [max(map(len, column.tolist())) for column in np.array_split(np.array(names), columns)]
    return sum(LEGEND_HANDLE + LEGEND_LETTER * length for length in longest)


def speed_axis(axes: Axes) -> None:
    """Queries per second on a logarithmic scale, written 1, 2, 5, 10 … 1k; call it when the points are drawn."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=WIDE_STEPS if high > 10 * low else NARROW_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def short_number(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def place_labels(figure: Figure, axes: Axes, labels: Sequence[Label], size: float = LABEL_SIZE) -> list[Label]:
    """Writes each text beside its point, where it covers no point, no line and no other text.

    Call it when all panels are drawn, as positions are measured. Returns the labels that fit nowhere.
    """
    theme.settle(figure)
    taken = [box for line in axes.lines for box in _boxes(axes, line, figure.dpi / 72)]
    return [label for label in labels if not any(_try(axes, label, place, size, taken) for place in label.places)]


def _try(axes: Axes, label: Label, place: Place, size: float, taken: list[Bbox]) -> bool:
    """Writes a label at one place, and takes it away again if the place is taken or outside."""
    dx, dy, across, along = place
    text = axes.annotate(
        theme.drawable(label.text),
        (label.x, label.y),
        (dx, dy),
        textcoords="offset points",
        ha=across,
        va=along,
        size=size,
        color=label.colour,
    )
    box = text.get_window_extent()
    if axes.bbox.count_contains(box.corners()) < len(box.corners()) or box.count_overlaps(taken):
        text.remove()
        return False
    taken.append(box)
    return True


def _boxes(axes: Axes, line: Line2D, dot: float) -> list[Bbox]:
    """What a line covers: its points, and a chain of small boxes between them."""
    corners = axes.transData.transform(np.column_stack((line.get_xdata(), line.get_ydata())))
    boxes = [_around(corner, POINT_REACH * dot) for corner in corners]
    for start, end in pairwise(corners):
        steps = max(2, int(np.hypot(*(end - start)) / (LINE_REACH * dot)))
        boxes += [_around(point, LINE_REACH * dot) for point in np.linspace(start, end, steps)]
    return boxes


def _around(point: np.ndarray, reach: float) -> Bbox:
    return Bbox([point - reach, point + reach])

"""Style of all pictures (colours, fonts, files) and shared parts: panels, legends, labels that do not overlap.

Systems differ by Okabe and Ito's colours, which people with any colour vision can tell apart, and by shape. In the page
the same colours are CSS variables, so that a picture follows the light or dark scheme. Imports matplotlib.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

PAPER, INK, SOFT, GRID = "#ffffff", "#1d2221", "#5b6361", "#e3e0d9"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7f7d")
MARKERS = ("o", "s", "D", "^", "v", "P")
VARIABLES = {PAPER: "card", INK: "ink", SOFT: "soft", GRID: "line"} | {
    colour: f"series-{number}" for number, colour in enumerate(SERIES, start=1)
}
PNG_DPI = 200
LATIN_FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")
CHINESE_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei", "SimHei")
SIZE = 9.0
STYLE = Path(__file__).with_name("pictures.mplstyle")


@contextmanager
def applied() -> Iterator[None]:
    """Applies the style to what is drawn or saved in the block."""
    with matplotlib.style.context([STYLE, {"font.family": list(_fonts())}]):
        yield


def colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def drawable(text: str) -> str:
    """Returns the text with □ for what no font of this machine can draw, which matplotlib would warn of."""
    known = _characters()
    return "".join(character if ord(character) in known else "□" for character in text)


def settle(figure: Figure) -> None:
    """Lays the figure out once and for all: it would be done again, at some cost, whenever it is measured or saved."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def save(figure: Figure, stem: Path) -> None:
    """Writes stem.png and stem.svg."""
    with applied():
        settle(figure)
        figure.savefig(stem.with_suffix(".png"), dpi=PNG_DPI)
    save_svg(figure, stem.with_suffix(".svg"))


def save_svg(figure: Figure, path: Path) -> None:
    """Writes an SVG; a reader without the fonts of this machine sees another sans-serif one."""
    written = StringIO()
    with applied():
        settle(figure)
        figure.savefig(written, format="svg", metadata={"Date": None})
    path.write_text(re.sub(r"(font-family: [^;\"]+)", r"\1, sans-serif", written.getvalue()), encoding="utf-8")


def inline(svg: str, name: str, description: str) -> str:
    """Makes a saved SVG part of a page: unique names, colours of the page, a description for screen readers."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, count=1, flags=re.DOTALL)
    drawing = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", drawing)
    for value, variable in VARIABLES.items():
        drawing = drawing.replace(value, f"var(--{variable})")
    box = re.search(r'viewBox="[^"]*"', drawing)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{description}" xmlns="http://www.w3.org/2000/svg">'
    return re.sub(r"<svg[^>]*>", lambda _: head, drawing, count=1)


@cache
def _fonts() -> tuple[str, ...]:
    """One font for Latin letters and, if the machine has one, one for Chinese characters."""
    installed = set(font_manager.get_font_names())
    latin = next(name for name in LATIN_FONTS if name in installed)
    return (latin, *[name for name in CHINESE_FONTS if name in installed][:1], "DejaVu Sans")


@cache
def _characters() -> frozenset[int]:
    fonts = (font_manager.get_font(font_manager.findfont(name)) for name in _fonts())
    return frozenset(code for font in fonts for code in font.get_charmap())


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
    """Returns a figure of rows of panels, each `height` inches high."""
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(width, height * down), layout=layout)
    FigureCanvasAgg(figure)
    return figure, [list(row) for row in figure.subplots(down, abreast, squeeze=False)]


def some_panels(count: int) -> tuple[Figure, list[Axes]]:
    """One large panel, or small ones two by two."""
    figure, rows = panels(1, 1, SINGLE_HEIGHT) if count == 1 else panels(-(-count // 2), 2, PANEL_HEIGHT)
    axes = [one for row in rows for one in row]
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def line_entry(name: str, place: int) -> Artist:
    return Line2D([], [], color=colour(place), marker=marker(place), markeredgewidth=0, label=drawable(name))


def area_entry(name: str, colour: str) -> Artist:
    return Patch(color=colour, linewidth=0, label=drawable(name))


def legend(figure: Figure, entries: Sequence[Artist]) -> None:
    """Draws a legend above the panels, in as many columns as fit; the figure grows by it."""
    names = [str(entry.get_label()) for entry in entries]
    columns = next(n for n in range(len(names), 0, -1) if n == 1 or _legend_width(names, n) <= figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * -(-len(names) // columns))
    figure.legend(handles=list(entries), loc="outside upper left", ncols=columns)


def _legend_width(names: Sequence[str], columns: int) -> float:
    """Estimates the width of a legend in inches, with names dealt to the columns as matplotlib does."""
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
    settle(figure)
    taken = [box for line in axes.lines for box in _boxes(axes, line, figure.dpi / 72)]
    return [label for label in labels if not any(_try(axes, label, place, size, taken) for place in label.places)]


def _try(axes: Axes, label: Label, place: Place, size: float, taken: list[Bbox]) -> bool:
    """Writes a label at one place, and takes it away again if the place is taken or outside."""
    dx, dy, across, along = place
    where: dict[str, Any] = {"textcoords": "offset points", "ha": across, "va": along}
    point = (label.x, label.y)
    text = axes.annotate(drawable(label.text), point, (dx, dy), **where, size=size, color=label.colour)
    box = text.get_window_extent()
    if axes.bbox.count_contains(box.corners()) < len(box.corners()) or box.count_overlaps(taken):
        text.remove()
        return False
    taken.append(box)
    return True


def _boxes(axes: Axes, line: Line2D, dot: float) -> list[Bbox]:
    """Returns what a line covers: its points, and a chain of small boxes between them."""
    corners = axes.transData.transform(np.column_stack((line.get_xdata(), line.get_ydata())))
    reaches = [(corner, POINT_REACH * dot) for corner in corners]
    for start, end in pairwise(corners):
        steps = max(2, int(np.hypot(*(end - start)) / (LINE_REACH * dot)))
        reaches += [(point, LINE_REACH * dot) for point in np.linspace(start, end, steps)]
    return [Bbox([point - reach, point + reach]) for point, reach in reaches]

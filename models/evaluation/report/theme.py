"""How pictures look: colours, fonts, and the way from a matplotlib figure to files and to a part of a page.

Systems are told apart by Okabe and Ito's colours, which people with any kind of colour vision can, and by shape.
In the page the same colours are CSS variables, so that a picture follows the reader's light or dark scheme.
Imports matplotlib: import this module only where pictures are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure

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
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "care",
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "font.size": SIZE,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.titlesize": SIZE + 1,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.left": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "lines.markeredgecolor": PAPER,
    "lines.markeredgewidth": 0.9,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
}


@contextmanager
def applied() -> Iterator[None]:
    """What is drawn or saved inside looks like this."""
    with matplotlib.rc_context({**STYLE, "font.family": list(_fonts())}):
        yield


def colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def drawable(text: str) -> str:
    """The text with □ for what no font of this machine can draw, which matplotlib would warn of."""
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
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def inline(svg: str, name: str, description: str) -> str:
    """A saved SVG as a part of a page: names of its own, colours of the page, a description for who cannot see it."""
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
    """One font for Latin letters and, where the machine has one, one for Chinese characters."""
    installed = set(font_manager.get_font_names())
    latin = next(name for name in LATIN_FONTS if name in installed)
    return (latin, *[name for name in CHINESE_FONTS if name in installed][:1], "DejaVu Sans")


@cache
def _characters() -> frozenset[int]:
    fonts = (font_manager.get_font(font_manager.findfont(name)) for name in _fonts())
    return frozenset(code for font in fonts for code in font.get_charmap())

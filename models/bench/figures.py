"""Draws figures 1 and 4 of the CARE paper at this project's scale, from the tables of docs/benchmarks.md.

  python -m models.bench.figures docs/benchmarks.md docs/figures

Figure 1 is quality against queries per second, figure 4 quality and parameters of the query encoder, by what reads the
documents. A figure's table is the first one below its heading. Writes one SVG for each.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import dropwhile, groupby, takewhile
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from models.errors import BadData, CareError
from models.evaluation.report import drawing, pictures
from models.evaluation.results import Run, SetResult
from models.evaluation.sets import Kind

SPEED, SIZES = "### Figure 1", "### Figure 4"
METRIC = "nDCG@10"
COLOURS = {"one encoder": drawing.SERIES[6], "pair": drawing.SERIES[0], "pair, short run": drawing.SERIES[5]}
BAR, WIDTH, FRAME = 0.24, 6.4, 0.9
"""Inches of one row, of the picture, and of what stands above and below the rows."""

Row = dict[str, str]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="Markdown file with the tables")
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    options = parser.parse_args(arguments)
    text = options.page.read_text(encoding="utf-8")
    options.folder.mkdir(parents=True, exist_ok=True)
    with drawing.applied():
        for name, figure in (("speed", speed(table(text, SPEED))), ("sizes", sizes(table(text, SIZES)))):
            drawing.save_svg(figure, options.folder / f"{name}.svg")
    return 0


def table(text: str, heading: str) -> list[Row]:
    """Returns the rows of the first table below a heading, by column; the column of a cell is its heading's text."""
    below = list(dropwhile(lambda line: not line.startswith(heading), text.splitlines()))[1:]
    section = takewhile(lambda line: not line.startswith("#"), below)
    lines = list(takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: line[:1] != "|", section)))
    if len(lines) < 3:
        raise BadData(f"{heading}: no table below it")
    columns, _, *rows = ([cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in lines)
    if short := next((row for row in rows if len(row) != len(columns)), None):
        raise BadData(f"{heading}: the row of {short[0]!r} has {len(short)} cells, the table {len(columns)} columns")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def speed(rows: Sequence[Row]) -> Figure:
    """Draws quality against queries per second as the report of `care eval` does."""
    results = [
        SetResult("", "", Kind.RETRIEVAL, row["system"], METRIC, {METRIC: _number(row[METRIC])}, [],
                  _number(row["queries a second"]))
        for row in rows
    ]  # fmt: skip
    run = Run(made="", command="", machine="", seconds=0.0, systems=[], results=results)
    figure = pictures.speed(run, {row["system"]: place for place, row in enumerate(rows)})
    assert figure is not None  # every row has both figures, or is refused above
    return figure


def sizes(rows: Sequence[Row]) -> Figure:
    """Draws a bar of quality for each query encoder and beside it its parameters, grouped by what reads documents."""
    if unknown := next((row["kind"] for row in rows if row["kind"] not in COLOURS), None):
        raise BadData(f"{SIZES}: no kind is called {unknown!r}; there are {', '.join(COLOURS)}")
    groups = {documents: list(own) for documents, own in groupby(rows, lambda row: row["documents"])}
    places = list(_places(groups))
    figure, [[quality, parameters]] = drawing.panels(1, 2, BAR * (len(rows) + 2 * len(groups)) + FRAME, WIDTH)
    bottom = places[-1][0] + 0.7
    for documents, own in groupby(places, lambda place: place[1]["documents"]):
        tops, members = zip(*own, strict=True)
        bars = quality.barh(tops, [_number(row[METRIC]) for row in members], height=0.8,
                            color=[COLOURS[row["kind"]] for row in members])  # fmt: skip
        quality.bar_label(bars, [row[METRIC] for row in members], padding=3, size=drawing.LABEL_SIZE)
        title = quality.text(
            0, tops[0] - 1, f"documents: {documents}", weight="bold", size=drawing.LABEL_SIZE, va="center"
        )
        title.set_in_layout(False)  # it may reach into the other panel, where this row is empty
        counts = [1e6 * _number(row["million parameters"]) for row in members]
        parameters.plot(counts, tops, color=drawing.SERIES[1], marker="o", markersize=8, linestyle="none")
        for count, top in zip(counts, tops, strict=True):
            number = drawing.short_number(count)
            parameters.annotate(
                number, (count, top), (8, 0), textcoords="offset points", va="center", size=drawing.LABEL_SIZE
            )
    quality.set_yticks([top for top, _ in places], [row["queries"] for _, row in places])
    quality.tick_params(axis="y", labelcolor=drawing.INK)
    quality.set(xlim=(0, 90), xlabel=f"mean {METRIC}")
    quality.set_zorder(1)
    drawing.speed_axis(parameters)
    parameters.xaxis.set_major_locator(FixedLocator([1e7, 3e7, 1e8, 3e8]))
    parameters.set(xlim=(7e6, 9e8), yticks=[], xlabel="parameters that read a query")
    for panel in (quality, parameters):
        panel.set_ylim(bottom, -0.4)
        panel.grid(visible=False, axis="y")
    drawing.legend(figure, [drawing.area_entry(kind, colour) for kind, colour in COLOURS.items()])
    return figure


def _places(groups: dict[str, list[Row]]) -> Iterator[tuple[float, Row]]:
    """Yields each row with its place from above; a group has its title before it."""
    place = 0.0
    for rows in groups.values():
        for number, row in enumerate(rows, start=1):
            yield place + number, row
        place += len(rows) + 1.3


def _number(cell: str) -> float:
    """Returns the first number of a cell: the median of `182 (175–207)`."""
    if (found := re.match(r"[\d,]+(\.\d+)?", cell)) is None:
        raise BadData(f"no number in {cell!r}")
    return float(found[0].replace(",", ""))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CareError, OSError) as error:
        sys.exit(f"figures: {error}")

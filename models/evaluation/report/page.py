"""Writes the report as one self-contained HTML page, with its pictures beside it as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from models.evaluation.report.tables import Cell, Column, explain, legend, tables
from models.evaluation.results import Run, SetResult
from models.evaluation.significance import Marks

if TYPE_CHECKING:
    from models.evaluation.report.pictures import Picture

PAGE, PICTURES = "index.html", "figures"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
DIRECTIONS = {"↑": "up", "↓": "down"}
STYLE = Path(__file__).with_name("page.css")


def write(run: Run, folder: Path, marks: Marks | None = None) -> Path:
    """Writes the page and its pictures into the folder and returns the page's path."""
    # matplotlib is slow to import.
    from models.evaluation.report import drawing
    from models.evaluation.report.pictures import draw

    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    figures = []
    for picture in draw(run):
        stem = folder / PICTURES / picture.name
        drawing.save(picture.figure, stem)
        svg = stem.with_suffix(".svg").read_text(encoding="utf-8")
        figures.append(_figure(picture, drawing.inline(svg, picture.name, escape(picture.title))))
    page = folder / PAGE
    page.write_text("\n".join(_document(run, marks or {}, figures)), encoding="utf-8")
    return page


def _document(run: Run, marks: Marks, figures: list[str]) -> Iterator[str]:
    systems = _count(len({result.system for result in run.results}), "system")
    sets = _count(len({(result.benchmark, result.set_name) for result in run.results}), "set")
    style = STYLE.read_text(encoding="utf-8")
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8"><title>Evaluation</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield f'<link rel="icon" href="data:,"><style>{style}</style></head><body>'
    yield f"<h1>Evaluation</h1><p class='lead'>{systems} on {sets}, {escape(run.made)}</p><main>"
    for table in tables(run, marks):
        heads = [f"{escape(column.title)}<small>{escape(column.subtitle)}</small>" for column in table.columns]
        rows = [_row(system, map(_cell, row, table.columns)) for system, row in table.rows.items()]
        yield f"<section><h2>{escape(table.benchmark or 'Results')}</h2>"
        yield _grid(["system", *heads], rows)
        yield f"<p class='note'>{escape(legend(marks))} The best figure of a column is bold.</p>"
        yield from _details([result for result in run.results if result.benchmark == table.benchmark])
        yield "</section>"
    if figures:
        yield "<section><h2>Pictures</h2><div class='pictures'>"
        yield from figures
        yield "</div></section>"
    if run.missing:
        yield "<section><h2>Not judged</h2><dl>"
        yield from (f"<dt>{escape(name)}</dt><dd>{escape(how)}</dd>" for name, how in run.missing.items())
        yield "</dl></section>"
    rows = []
    for facts in run.systems:
        sizes = (f"{size:,}" if size else "–" for size in (facts.dim, facts.parameters))
        rows.append(_plain_row(facts.name, (facts.kind, *sizes, facts.fingerprint or "–")))
    yield "<section><h2>Systems</h2>"
    yield _grid(("system", "kind", "dimensions", "parameters", "fingerprint"), rows)
    yield "</section></main>"
    yield f"<footer><p><code>{escape(run.command)}</code></p>"
    yield f"<p>{escape(run.machine)} · {escape(run.made)} · {run.seconds:,.0f} s</p></footer></body></html>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _grid(heads: Iterable[str], rows: Iterable[str]) -> str:
    """Returns a table that scrolls on a narrow screen; heads and rows are HTML."""
    head = "".join(f"<th scope='col'>{head}</th>" for head in heads)
    body = "".join(rows)
    return f"<div class='card scroll'><table><thead><tr>{head}</tr>\n</thead><tbody>{body}</tbody></table></div>"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"<tr><th scope='row'>{escape(name)}</th>{''.join(cells)}</tr>\n"


def _plain_row(name: str, texts: Iterable[str]) -> str:
    return _row(name, (f"<td>{escape(text)}</td>" for text in texts))


def _cell(cell: Cell, column: Column) -> str:
    figure = f"<b>{cell.text}</b>" if cell.best else cell.text
    kind = " class='average'" if column.is_average else ""
    title = f" title='{escape(explain(cell.mark))}'" if cell.mark else ""
    direction = DIRECTIONS.get(cell.symbol, "")
    return f"<td{kind}{title}>{figure}<span class='mark {direction}'>{cell.symbol}</span></td>"


def _details(results: Iterable[SetResult]) -> Iterator[str]:
    """Yields every metric, folded away: a table for each kind of set."""
    kinds: dict[str, list[SetResult]] = {}
    for result in results:
        kinds.setdefault(result.kind, []).append(result)
    yield "<details><summary>Every metric</summary>"
    for kind, group in kinds.items():
        metrics = list(dict.fromkeys(name for result in group for name in result.metrics))
        rows = []
        for result in group:
            figures = (f"{result.metrics[name]:.2f}" if name in result.metrics else "–" for name in metrics)
            speed = f"{result.queries_per_second:,.1f}" if result.queries_per_second else "–"
            rows.append(_plain_row(f"{result.set_name} · {result.system}", (*figures, speed)))
        yield _grid([kind, *map(escape, metrics), "queries/s"], rows)
    yield "</details>"


def _figure(picture: Picture, svg: str) -> str:
    files = " ".join(f"<a href='{PICTURES}/{picture.name}.{kind}'>{kind.upper()}</a>" for kind in ("png", "svg"))
    return (
        f"<figure class='card' id='{picture.name}'><h3>{escape(picture.title)}</h3><div class='scroll'>{svg}</div>"
        f"<figcaption>{escape(picture.caption)} {files}</figcaption></figure>"
    )

"""The report as one HTML page that asks nothing of any network, with its pictures beside it as PNG and SVG."""

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
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8"><title>Evaluation</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield f'<link rel="icon" href="data:,"><style>{CSS}</style></head><body>'
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
    """A table that scrolls on a narrow screen; heads and rows are HTML."""
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
    """Every metric, folded away: a table for each kind of set."""
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


CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfaf8; --card: #fff; --line: #e3e0d9; --ink: #1d2221; --soft: #5b6361; --accent: #12645f;
  --up: #00694d; --down: #a8460a;
  --series-1: #0072b2; --series-2: #d55e00; --series-3: #009e73; --series-4: #cc79a7; --series-5: #e69f00;
  --series-6: #56b4e9; --series-7: #7a7f7d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131615; --card: #1b1f1e; --line: #363d3b; --ink: #e6e8e5; --soft: #a3aca9; --accent: #74c7be;
    --up: #58cfa9; --down: #f0995e;
    --series-1: #58a9e0; --series-2: #f0874a; --series-3: #3fc59b; --series-4: #e2a0c6; --series-5: #f0bb45;
    --series-6: #9bd4f5; --series-7: #a3aaa7;
  }
}
* { box-sizing: border-box; }
body {
  max-width: 78rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC",
    sans-serif;
  text-size-adjust: 100%; -webkit-text-size-adjust: 100%;
}
h1, h2, h3, p, dl, dd, figure { margin: 0; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.01em; }
h2 { margin: 2.5rem 0 0.75rem; font-size: 1.3rem; }
h3 { font-size: 1.05rem; }
a, summary { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.lead, .note, figcaption, footer { color: var(--soft); }
.note, figcaption, footer { font-size: 0.875rem; }
.note { margin-top: 0.6rem; max-width: 60rem; }
.card { border: 1px solid var(--line); border-radius: 12px; background: var(--card); }
.scroll { overflow-x: auto; }
.card.scroll { width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-size: 0.94rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.45rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { font-weight: 600; vertical-align: bottom; }
thead small { display: block; color: var(--soft); font-weight: 400; }
th:first-child { position: sticky; left: 0; background: var(--card); text-align: left; }
tbody th { font-weight: 500; }
td.average { background: color-mix(in srgb, var(--line) 30%, var(--card)); }
.up { color: var(--up); } .down { color: var(--down); }
.mark { display: inline-block; width: 0.9em; text-align: left; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; }
details .card { margin-top: 0.75rem; }
.pictures { columns: 2 30rem; column-gap: 1.25rem; }
figure { break-inside: avoid; margin-bottom: 1.25rem; padding: 1.1rem 1.1rem 1rem; }
figure svg { display: block; width: 100%; min-width: 19rem; height: auto; margin: 0.75rem 0; }
figcaption a { white-space: nowrap; }
dt { font-weight: 600; }
dd { margin-bottom: 0.5rem; color: var(--soft); }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
code { font: 0.85em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 0.9rem 2rem; }
  h1 { font-size: 1.5rem; }
  th, td { padding: 0.4rem 0.55rem; }
  th:first-child { min-width: 7.5rem; white-space: normal; overflow-wrap: break-word; }
  figure { padding: 0.9rem; }
}
@media print { .pictures { columns: 1; } }
"""

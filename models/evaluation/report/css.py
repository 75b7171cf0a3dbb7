"""The looks of the page. Colours first; both schemes are the same page in another light."""

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

"""Compare two runs, or two systems of one: the figures of each set, and the queries that changed most.

care eval diff before.json.gz after.json.gz
care eval diff run.json.gz run.json.gz --system BM25 --system care-small-zh --set cslrel --limit 5
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.errors import CareError
from models.evaluation.report.tables import display_width
from models.evaluation.results import GOLD_SCORE, SIMILARITY, Hit, QueryResult, Run, SetResult
from models.evaluation.sets import Kind
from models.evaluation.significance import MIN_QUERIES, Mark, paired, per_query

HITS_SHOWN, GOLD_SHOWN = 3, 2
LINE = 120


@dataclass(frozen=True, slots=True)
class Change:
    """One query before and after; `difference` is what it adds to the set's figure, in percent points of its own."""

    before: QueryResult
    after: QueryResult
    difference: float


@dataclass(frozen=True, slots=True)
class SetDiff:
    """One set by two systems, and its queries, those that changed most first."""

    before: SetResult
    after: SetResult
    mark: Mark
    changes: list[Change]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="a run that care eval saved")
    parser.add_argument("b", type=Path, metavar="B", help="the run to compare with it; may be the same one")
    parser.add_argument("--set", dest="set_name", metavar="NAME", help="only this set (default: all)")
    both = "only this system; given twice: the first of A against the second of B (default: all that both have)"
    parser.add_argument("--system", action="append", metavar="NAME", help=both)
    parser.add_argument("--limit", type=int, default=10, help="queries shown for each set (%(default)s)")


def run(arguments: Namespace) -> None:
    if arguments.limit < 0:
        raise CareError("--limit must not be below 0")
    before, after = Run.load(arguments.a), Run.load(arguments.b)
    systems = choose_systems(before, after, arguments.system or [], same_run=arguments.a.samefile(arguments.b))
    print(f"A  {arguments.a}  {before.made}  {before.command}")
    print(f"B  {arguments.b}  {after.made}  {after.command}")
    for diff in compare(before, after, systems, arguments.set_name):
        print()
        print("\n".join(lines(diff, arguments.limit)))


def choose_systems(before: Run, after: Run, named: Sequence[str], *, same_run: bool) -> list[tuple[str, str]]:
    """Returns which system of the first run is compared with which of the second."""
    ours, theirs = ([facts.name for facts in run.systems] for run in (before, after))
    if len(named) > 2:
        raise CareError("--system may be given once or twice: one of A, one of B")
    if named:
        first, second = named[0], named[-1]
        for name, known, run_name in ((first, ours, "A"), (second, theirs, "B")):
            if name not in known:
                raise CareError(f"--system {name}: {run_name} has no such system, only {', '.join(known)}")
        return [(first, second)]
    if same_run:
        raise CareError(f"A and B are one run; name two of its systems with --system ({', '.join(ours)})")
    if common := [name for name in ours if name in theirs]:
        return [(name, name) for name in common]
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    raise CareError(f"no system is in both; give --system twice (A: {', '.join(ours)}; B: {', '.join(theirs)})")


def compare(before: Run, after: Run, systems: Sequence[tuple[str, str]], set_name: str | None) -> list[SetDiff]:
    """Returns every set that both runs hold, or the named one, for each pair of systems."""
    theirs = {(each.benchmark, each.set_name, each.system): each for each in after.results}
    pairs = [
        (ours, theirs[ours.benchmark, ours.set_name, second])
        for first, second in systems
        for ours in before.results
        if ours.system == first and (ours.benchmark, ours.set_name, second) in theirs
    ]
    known = list(dict.fromkeys(first.set_name for first, _ in pairs))
    if set_name is not None:
        pairs = [pair for pair in pairs if pair[0].set_name == set_name]
    if not pairs:
        wanted = "" if set_name is None else f"--set {set_name}: "
        raise CareError(f"{wanted}not a set that both were judged on ({', '.join(known) or 'none'})")
    return [_compare_set(first, second) for first, second in pairs]


def lines(diff: SetDiff, limit: int) -> Iterator[str]:
    """Yields what a terminal shows of one set."""
    before, after, mark = diff.before, diff.after, diff.mark
    differences = np.array([change.difference for change in diff.changes])
    width = max(display_width(before.system), display_width(after.system))
    yield f"{before.set_name} · {before.main_metric} · {len(diff.changes)} {_noun(before)}"
    for letter, result in (("A", before), ("B", after)):
        padding = " " * (width - display_width(result.system))
        yield f"  {letter}  {result.system}{padding}  {result.value:6.2f}"
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    if mark.p is None:
        yield f"  B − A {mark.difference:+.2f}; fewer than {MIN_QUERIES} {_noun(before)} tell no more"
    else:
        t_test = "" if mark.t_test is None else f", t-test p {mark.t_test:.4f}"
        between = f"95 % between {mark.low:+.2f} and {mark.high:+.2f}"
        yield f"  B − A {mark.difference:+.2f}, {between}, p {mark.p:.4f}{t_test}"
    yield f"  {better} better, {worse} worse, {len(differences) - better - worse} equal"
    for place, change in enumerate(diff.changes[:limit], start=1):
        if change.difference:
            yield ""
            yield from _change_lines(place, change, before)


def _compare_set(before: SetResult, after: SetResult) -> SetDiff:
    [mark] = paired([after], before)
    differences = (100 * (per_query(after) - per_query(before))).tolist()
    changes = [Change(*each) for each in zip(before.queries, after.queries, differences, strict=True)]
    return SetDiff(before, after, mark, sorted(changes, key=lambda change: -abs(change.difference)))


def _noun(result: SetResult) -> str:
    return "pairs" if result.kind is Kind.STS else "queries"


def _change_lines(place: int, change: Change, result: SetResult) -> Iterator[str]:
    before, after = change.before, change.after
    name = SIMILARITY if result.kind is Kind.STS else result.main_metric
    values = f"{before.metrics[name]:.3f} → {after.metrics[name]:.3f}"
    yield _cut(f"{place:3}. {values}  {before.id}  {' ⇆ '.join(before.text.splitlines())}")
    if result.kind is Kind.STS:
        yield f"     given {before.metrics[GOLD_SCORE]:g}"
    yield from _hit_lines("gold", before.gold[:GOLD_SHOWN])
    yield from _hit_lines("A", before.hits[:HITS_SHOWN])
    yield from _hit_lines("B", after.hits[:HITS_SHOWN])


def _hit_lines(name: str, hits: Sequence[Hit]) -> Iterator[str]:
    for place, hit in enumerate(hits):
        yield _cut(f"     {'' if place else name:5} grade {hit.grade}  {hit.id}  {hit.text}")


def _cut(text: str) -> str:
    """One line, as much of it as a terminal shows."""
    text = text.replace("\n", " ").rstrip()
    if display_width(text) <= LINE:
        return text
    while display_width(text) > LINE - 1:
        text = text[: -max(1, (display_width(text) - LINE) // 2)]
    return f"{text}…"

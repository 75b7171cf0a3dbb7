"""Make training rows from raw texts, step by step. The same call goes on where a killed one stopped.

care curate clean RAW.jsonl.gz --out clean.jsonl               entities, control characters, boilerplate, lengths
care curate split clean.jsonl --out passages.jsonl             documents into passages or sentences
care curate dedup passages.jsonl --out once.jsonl              equal and near-equal rows once (needs the curate extra)
care curate anonymize once.jsonl --out safe.jsonl --sample 100     names, phones, numbers and addresses masked

A step reads JSON lines, plain, .gz or .xz. It writes OUT, and OUT.report.json: what was kept, why the rest was dropped.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from models.package import positive, share

if TYPE_CHECKING:
    from models.curation.frame import Step


def add_arguments(parser: ArgumentParser) -> None:
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")

    def step(name: str, make: Callable[[Namespace], Step], help: str) -> ArgumentParser:
        own = steps.add_parser(name, help=help, description=help)
        own.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines: plain, .gz or .xz")
        own.add_argument("--out", type=Path, required=True, help="JSON lines to write")
        shown = "write N changed rows, before and after, to OUT.sample.jsonl for a person to read"
        own.add_argument("--sample", type=positive, default=0, metavar="N", help=shown)
        own.set_defaults(make=make)
        return own

    own = step("clean", _clean, "remove entities, tags, control characters and boilerplate; drop by length")
    own.add_argument("--shortest", type=positive, metavar="UNITS", help="words and Chinese characters at least (1)")
    own.add_argument("--longest", type=positive, metavar="UNITS", help="words and Chinese characters at most (10000)")
    own.add_argument("--boilerplate", type=Path, metavar="FILE", help="more patterns of lines to remove, one a line")

    own = step("split", _split, "split documents into passages or sentences")
    own.add_argument("--by", choices=("passage", "sentence"), help="what to make (passage)")
    own.add_argument("--units", type=positive, help="words and Chinese characters of a passage at most (256)")
    own.add_argument("--shortest", type=positive, metavar="CHARACTERS", help="leave out shorter pieces (6)")
    own.add_argument("--from-pairs", action="store_true", help="split the positives of training rows, too")

    own = step("dedup", _dedup, "keep the first of equal and near-equal rows")
    own.add_argument("--by", choices=("row", "query", "text"), help="what is compared (row: query or title, and texts)")
    own.add_argument(
        "--near", type=share, metavar="SIMILARITY", help="Jaccard similarity of duplicates; 0: equal (0.85)"
    )

    own = step("anonymize", _anonymize, "mask names, phones, identity and record numbers, addresses, e-mails")
    own.add_argument(
        "--residual", type=positive, metavar="DIGITS", help="flag runs of as many digits that are left (7)"
    )
    own.add_argument("--drop-residual", action="store_true", help="drop the rows with such runs")


def run(arguments: Namespace) -> None:
    from models.curation.frame import Files, run_step

    run_step(arguments.make(arguments), Files(arguments.files, arguments.out), sample=arguments.sample)


def _given(arguments: Namespace, *names: str) -> dict[str, object]:
    """The options that were given: the others keep the step's defaults."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _clean(arguments: Namespace) -> Step:
    from models.curation.clean import Clean

    lines = arguments.boilerplate.read_text(encoding="utf-8").splitlines() if arguments.boilerplate else ()
    more = [line for line in lines if line.strip()]
    return Clean(boilerplate=more, **_given(arguments, "shortest", "longest"))  # type: ignore[arg-type]


def _split(arguments: Namespace) -> Step:
    from models.curation.split import Split

    return Split(**_given(arguments, "by", "units", "shortest", "from_pairs"))  # type: ignore[arg-type]


def _dedup(arguments: Namespace) -> Step:
    from models.curation.dedup import Dedup

    return Dedup(**_given(arguments, "by", "near"))  # type: ignore[arg-type]


def _anonymize(arguments: Namespace) -> Step:
    from models.curation.anonymize import Anonymize

    return Anonymize(**_given(arguments, "residual", "drop_residual"))  # type: ignore[arg-type]

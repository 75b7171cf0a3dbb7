"""Make training rows from raw texts, step by step. The same call goes on where a killed one stopped.

care curate clean RAW.jsonl.gz --out clean.jsonl               entities, control characters, boilerplate, lengths
care curate split clean.jsonl --out passages.jsonl             documents into passages or sentences
care curate dedup passages.jsonl --out once.jsonl              equal and near-equal rows once (needs the curate extra)
care curate anonymize once.jsonl --out safe.jsonl --sample 100     names, phones, numbers and addresses masked
care curate judge rows.jsonl --out judged.jsonl --judge qwen@http://127.0.0.1:8080/v1 --judge MODEL@URL#KEY_VARIABLE

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

    own = step("judge", _judge, "grade passages by several language models; keep what all agree on")
    own.add_argument(
        "--judge",
        action="append",
        required=True,
        metavar="MODEL[@URL[#KEY_VARIABLE]]",
        help="a model behind OpenAI's chat completions; several times (OPENAI_BASE_URL, OPENAI_API_KEY)",
    )
    own.add_argument("--answers", type=Path, help="file that keeps every answer of the models (OUT.answers.jsonl)")
    own.add_argument("--language", choices=("zh", "en"), help="of the prompt (zh)")
    own.add_argument("--batch", type=positive, help="passages of a request at most (10)")
    own.add_argument("--relevant", type=int, metavar="GRADE", help="least grade of a positive by every judge (3)")
    own.add_argument("--irrelevant", type=int, metavar="GRADE", help="highest grade of a negative by every judge (2)")
    own.add_argument("--at-once", type=positive, help="requests at once (8)")
    own.add_argument("--per-minute", type=positive, help="requests to each judge in a minute at most (no limit)")
    own.add_argument("--timeout-seconds", type=positive, help="how long to wait for an answer (120)")
    own.add_argument("--max-tokens", type=positive, help="of an answer; reasoning models need more (1024)")


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


def _judge(arguments: Namespace) -> Step:
    from models.curation.judge import JudgeRows
    from models.curation.panel import Judge, Limits

    judges = [Judge.parse(text) for text in arguments.judge]
    answers = arguments.answers or arguments.out.with_name(f"{arguments.out.name}.answers.jsonl")
    limits = Limits(**_given(arguments, "at_once", "per_minute", "timeout_seconds", "max_tokens"))  # type: ignore[arg-type]
    options = _given(arguments, "language", "batch", "relevant", "irrelevant")
    return JudgeRows(judges, answers, limits=limits, **options)  # type: ignore[arg-type]

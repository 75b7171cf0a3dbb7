"""Make training rows and benchmarks from raw texts, step by step. The same call goes on where a killed one stopped.

care curate clean RAW.jsonl.gz --out clean.jsonl               entities, control characters, boilerplate, lengths
care curate diversify safe.jsonl --out spread.jsonl --encoder FOLDER         drop what is like too many kept texts
care curate synthesize passages.jsonl --out asked.jsonl --kind query --model qwen@http://127.0.0.1:8080/v1
care curate mine asked.jsonl --out mined.jsonl --corpus passages.jsonl --encoder FOLDER --bm25 --ranks 0 50 --count 50
care curate judge mined.jsonl --out judged.jsonl --judge qwen@http://127.0.0.1:8080/v1 --judge MODEL@URL#KEY_VARIABLE

A step reads JSON lines, plain, .gz or .xz. It writes OUT, and OUT.report.json: what was kept, why the rest was dropped.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import CareError
from models.package import natural, nonnegative, number, positive, share

if TYPE_CHECKING:
    from models.curation.frame import Step
    from models.curation.search import Retrievers


def add_arguments(parser: ArgumentParser) -> None:
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")

    def step(name: str, make: str | Callable[[Namespace], Step], help: str) -> ArgumentParser:
        own = steps.add_parser(name, help=help, description=help)
        own.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines: plain, .gz or .xz")
        own.add_argument("--out", type=Path, required=True, help="JSON lines to write")
        shown = "write N changed rows, before and after, to OUT.sample.jsonl for a person to read"
        own.add_argument("--sample", type=positive, default=0, metavar="N", help=shown)
        own.set_defaults(make=partial(_make, make) if isinstance(make, str) else make)
        return own

    own = step(
        "gather", _gather, "fetch general text from public packages and repositories; the FILE is a list of them"
    )
    own.add_argument("--downloads", type=Path, metavar="FOLDER", help="keeps what was fetched (OUT.downloads)")
    own.add_argument("--strict", action="store_true", help="fail if a source cannot be had, instead of leaving it out")

    own = step("clean", _clean, "remove entities, tags, control characters and boilerplate; drop by length")
    own.add_argument("--shortest", type=positive, metavar="UNITS", help="words and Chinese characters at least (1)")
    own.add_argument("--longest", type=positive, metavar="UNITS", help="words and Chinese characters at most (10000)")
    own.add_argument("--boilerplate", type=Path, metavar="FILE", help="more patterns of lines to remove, one a line")
    shown = "rows are pages of the book in source: remove running heads, page numbers, captions, citations"
    own.add_argument("--book", action="store_true", help=shown)

    own = step("split", "split.Split", "split documents into passages or sentences")
    own.add_argument("--by", choices=("passage", "sentence"), help="what to make (passage)")
    own.add_argument("--units", type=positive, help="words and Chinese characters of a passage at most (256)")
    own.add_argument("--shortest", type=positive, metavar="CHARACTERS", help="leave out shorter pieces (6)")
    own.add_argument("--from-pairs", action="store_true", help="split the positives of training rows, too")

    own = step("dedup", "dedup.Dedup", "keep the first of equal and near-equal rows")
    own.add_argument("--by", choices=("row", "query", "text"), help="what is compared (row: query or title, and texts)")
    own.add_argument(
        "--near", type=share, metavar="SIMILARITY", help="Jaccard similarity of duplicates; 0: equal (0.85)"
    )

    own = step("exclude", "exclude.Exclude", "drop rows that hold text of evaluation sets")
    shown = "a folder of evaluation sets, as care eval reads it; several times"
    own.add_argument("--against", type=Path, action="append", required=True, metavar="FOLDER", help=shown)
    own.add_argument("--words", type=positive, metavar="N", help="words in a row that two texts may not share (13)")
    shown = "compare with the queries of the sets alone, not with their documents"
    own.add_argument("--queries-only", action="store_true", help=shown)

    own = step("take", "take.Take", "take a share of the rows of each source, the same in every run")
    shown = "from which place up to which, 0 to 1: 0 0.9 and 0.9 1 have no query in common"
    own.add_argument("--share", type=float, nargs=2, required=True, metavar=("FROM", "TO"), help=shown)
    own.add_argument("--seed", type=int, help="of the order (0)")

    own = step("anonymize", _anonymize, "mask names, phones, identity and record numbers, addresses, e-mails")
    own.add_argument(
        "--residual", type=positive, metavar="DIGITS", help="flag runs of as many digits that are left (7)"
    )
    own.add_argument("--drop-residual", action="store_true", help="drop the rows with such runs")
    _add_models(own, "--model", required=False)

    own = step("convert", _convert, "turn a public set in its published format into rows")
    own.add_argument("--format", required=True, help="one of those that docs/curation.md lists, as medquad or beir")
    own.add_argument("--split", help="of a BEIR folder, whose queries.jsonl is the FILE (test)")

    own = step("diversify", _diversify, "drop texts that are like too many kept ones (evolving index)")
    own.add_argument("--encoder", required=True, metavar="FOLDER[,name=value]", help="as care eval --encoder takes it")
    own.add_argument("--by", choices=("query", "text"), help="what is compared (text)")
    own.add_argument("--threshold", type=share, help="cosine above which two are alike (0.85 for query, 0.78 for text)")
    own.add_argument("--neighbours", type=positive, help="nearest kept texts that are looked at (5)")
    own.add_argument("--most", type=int, help="how many of them may be alike (1)")
    own.add_argument("--seeds", type=int, help="rows that are kept without a comparison (5000)")
    own.add_argument(
        "--exact", type=int, metavar="ROWS", help="kept rows up to which search is exact, then HNSW (50000)"
    )

    own = step("mine", "mine.Mine", "add hard negatives that an encoder, BM25 or both find in a corpus")
    _add_search(own)
    own.add_argument("--count", type=positive, help="negatives that are added to a row (7)")
    own.add_argument("--ranks", type=int, nargs=2, metavar=("FIRST", "LAST"), help="window to draw from (0 100)")
    own.add_argument(
        "--margin", type=number, help="how far below the best positive a negative's cosine must be (no limit)"
    )
    own.add_argument("--within", choices=("all", "source"), help="which documents a row may find (all)")
    own.add_argument(
        "--consistent", type=positive, metavar="TOP", help="drop rows with no positive among the first TOP"
    )
    own.add_argument("--seed", type=natural, help="of the draw (0)")

    own = step("pool", "mine.Pool", "give queries the first documents of several systems, to be judged")
    _add_search(own)
    own.add_argument("--depth", type=positive, help="documents of each system (50)")

    own = step("synthesize", "synthesize.Synthesize", "write rows with a language model: one --kind a run")
    _add_models(own, "--model")
    own.add_argument("--kind", required=True, choices=("query", "tasks", "triple", "paraphrase", "synonym"))
    own.add_argument("--instruction", help="put into every row")
    own.add_argument("--dictionary", type=Path, help="JSON lines {origin, replace}, for --kind synonym")
    own.add_argument("--count", type=positive, help="tasks of each text, for --kind tasks (10)")
    own.add_argument("--temperature", type=nonnegative, help="of the model (0.7)")
    own.add_argument("--seed", type=int, help="of the model and of draws (0)")

    own = step("hyde", "hyde.Hyde", "add the hypothetical document that finds a row's source best (SL-HyDE)")
    _add_models(own, "--model")
    _add_search(own, words=False)
    own.add_argument("--documents", type=positive, help="drafts of each row (5)")
    own.add_argument("--blind", action="store_true", help="the model does not see the source")
    own.add_argument("--temperature", type=nonnegative, help="of the model (0.7)")
    own.add_argument("--seed", type=int, help="of the first draft (0)")

    own = step(
        "match", "match.Match", "find documents with evidence for an answer (CMIRB's Algorithm 1): one --task a run"
    )
    _add_models(own, "--model")
    own.add_argument("--task", required=True, choices=("medical", "select", "extract", "answer", "check"))
    own.add_argument("--selected", type=positive, metavar="N", help="passages that --task select keeps at most (3)")

    own = step("judge", "judge.JudgeRows", "grade passages by several language models; keep what all agree on")
    _add_models(own, "--judge")
    _add_grades(own)
    drop = "drop negatives that are relevant, instead of making them positives"
    own.add_argument("--no-promote", dest="promote", action="store_false", default=None, help=drop)

    own = steps.add_parser(
        "audit", help="count the likely wrong labels of a retrieval set by judging what search finds first"
    )
    own.add_argument("folder", type=Path, metavar="SET", help="a folder of BEIR's shape")
    own.add_argument("--out", type=Path, required=True, help="JSON lines to write: the set's queries, judged")
    own.add_argument("--split", default="test", help="of the set's judgements (test)")
    _add_search(own, corpus=False)
    own.add_argument("--depth", type=positive, help="documents of each system (50)")
    _add_models(own, "--judge")
    _add_grades(own)
    own.set_defaults(run=_audit)

    own = step("benchmark", _benchmark, "write judged rows as retrieval and reranking sets with a data card")
    own.add_argument(
        "--corpus", type=Path, nargs="+", required=True, metavar="FILE", help="documents that are searched"
    )
    own.add_argument("--sts", type=Path, nargs="+", metavar="FILE", help="rows of synthesize --kind synonym")
    own.add_argument("--folder", type=Path, help="where the sets are written (OUT without its ending)")


def _add_search(own: ArgumentParser, *, corpus: bool = True, words: bool = True) -> None:
    if corpus:
        own.add_argument(
            "--corpus", type=Path, nargs="+", required=True, metavar="FILE", help="documents that are searched"
        )
    shown = "an encoder that searches, as care eval --encoder takes it; several times for pool and audit"
    own.add_argument("--encoder", action="append", default=[], metavar="FOLDER[,name=value]", help=shown)
    if words:
        own.add_argument("--bm25", action="store_true", help="search by words, too")
    own.set_defaults(bm25=False)
    own.add_argument("--vectors", type=Path, help="folder that keeps the corpus's vectors (OUT.vectors)")


def _add_models(own: ArgumentParser, option: str, *, required: bool = True) -> None:
    shown = "a model behind OpenAI's chat completions; several times (OPENAI_BASE_URL, OPENAI_API_KEY)"
    own.add_argument(
        option, dest="models", action="append", required=required, metavar="MODEL[@URL[#KEY_VARIABLE]]", help=shown
    )
    own.add_argument("--answers", type=Path, help="file that keeps every answer of the models (OUT.answers.jsonl)")
    own.add_argument(
        "--price", dest="prices", action="append", nargs=3, default=[], metavar=("MODEL", "PROMPT", "ANSWER"),
        help="what a million tokens cost, of prompts and of answers: the report has the cost; several times",
    )  # fmt: skip
    own.add_argument("--language", choices=("zh", "en"), help="of the prompt (zh)")
    own.add_argument("--at-once", type=positive, help="requests at once (8)")
    own.add_argument("--per-minute", type=positive, help="requests to each model in a minute at most (no limit)")
    own.add_argument("--timeout-seconds", type=positive, help="how long to wait for an answer (120)")
    own.add_argument("--max-tokens", type=positive, help="of an answer; reasoning models need more (1024)")


def _add_grades(own: ArgumentParser) -> None:
    own.add_argument("--batch", type=positive, help="passages of a request at most (10)")
    own.add_argument("--relevant", type=int, metavar="GRADE", help="least grade of a positive by every judge (3)")
    own.add_argument("--irrelevant", type=int, metavar="GRADE", help="highest grade of a negative by every judge (2)")


def run(arguments: Namespace) -> None:
    if "run" in arguments:
        arguments.run(arguments)
        return
    from models.curation.frame import Files, run_step

    values = [vars(arguments).get(name) or () for name in ("corpus", "sts", "dictionary", "boilerplate")]
    others = [path for value in values for path in ([value] if isinstance(value, Path) else value)]
    kept = [_answers(arguments)] if vars(arguments).get("models") else []
    files = Files(arguments.files, arguments.out, others, kept)
    run_step(arguments.make(arguments), files, sample=arguments.sample)


def _given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """The options that were given: the others keep the step's defaults."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _make(place: str, arguments: Namespace) -> Step:
    """The step MODULE.CLASS of the options that its fields name, and of the models and the corpus that it asks for."""
    module, _, name = place.partition(".")
    kind = getattr(import_module(f"models.curation.{module}"), name)
    parts = _given(arguments, *(field.name for field in fields(kind) if field.name in arguments))
    if "models" in arguments:
        parts |= _asking(arguments)
    if "bm25" in arguments:
        parts["retrievers"] = _retrievers(arguments, arguments.corpus)
    step: Step = kind(**parts)
    return step


def _gather(arguments: Namespace) -> Step:
    from models.curation.gather import Gather

    return Gather(arguments.files, arguments.downloads or _beside(arguments, ".downloads"), arguments.strict)


def _clean(arguments: Namespace) -> Step:
    from models.curation.clean import Clean
    from models.rows import read_lines

    lines = read_lines(arguments.boilerplate) if arguments.boilerplate else ()
    more = [line.text.rstrip("\r\n") for line in lines]
    return Clean(boilerplate=more, **_given(arguments, "shortest", "longest", "book"))


def _anonymize(arguments: Namespace) -> Step:
    from models.curation.anonymize import Anonymize

    rules = Anonymize(**_given(arguments, "residual", "drop_residual"))
    if not arguments.models:
        return rules
    from models.curation.personal import AnonymizeWithModel

    return AnonymizeWithModel(**_asking(arguments), rules=rules)


def _beside(arguments: Namespace, ending: str) -> Path:
    """A path beside OUT."""
    out: Path = arguments.out
    return out.parent / (out.name + ending)


def _convert(arguments: Namespace) -> Step:
    from models.curation.convert import FORMATS, Convert

    if arguments.format not in FORMATS:
        raise CareError(f"--format {arguments.format}: choose from {', '.join(FORMATS)}")
    return Convert(arguments.format, **_given(arguments, "split"))


def _diversify(arguments: Namespace) -> Step:
    from models.curation.diversify import Diversify
    from models.curation.vectors import TextEncoder

    options = _given(arguments, "by", "threshold", "neighbours", "most", "seeds", "exact")
    return Diversify(TextEncoder(arguments.encoder), _beside(arguments, ".state"), **options)


def _retrievers(arguments: Namespace, corpus: Sequence[Path]) -> Retrievers:
    from models.curation.search import Retrievers
    from models.curation.vectors import TextEncoder

    encoders = [TextEncoder(place) for place in arguments.encoder]
    return Retrievers(corpus, encoders, arguments.bm25, arguments.vectors or _beside(arguments, ".vectors"))


def _asking(arguments: Namespace) -> dict[str, Any]:
    """Returns the options of every step that asks language models."""
    from models.curation.panel import Limits, Model

    limits = Limits(**_given(arguments, "at_once", "per_minute", "timeout_seconds", "max_tokens"))
    prices = _prices(arguments.prices)
    models = [Model.parse(text) for text in arguments.models]
    if strange := prices.keys() - {model.name for model in models}:
        raise CareError(f"--price {min(strange)}: not the name of a model that is asked")
    models = [replace(model, price=prices.get(model.name)) for model in models]
    return {"models": models, "answers": _answers(arguments), "limits": limits, **_given(arguments, "language")}


def _prices(given: Sequence[Sequence[str]]) -> dict[str, tuple[float, float]]:
    try:
        prices = {name: (float(prompt), float(answer)) for name, prompt, answer in given}
    except ValueError as error:
        raise CareError(f"--price: {error}; write MODEL and two numbers, as deepseek-chat 0.28 0.42") from error
    if not all(0 <= price < inf for each in prices.values() for price in each):
        raise CareError("--price: a price is 0 or more")
    return prices


def _audit(arguments: Namespace) -> None:
    from models.curation.audit import run_audit
    from models.curation.judge import JudgeRows

    judge = JudgeRows(**_asking(arguments), **_given(arguments, "batch", "relevant", "irrelevant"))
    options = _given(arguments, "split", "depth")
    run_audit(arguments.folder, arguments.out, lambda corpus: _retrievers(arguments, [corpus]), judge, **options)


def _answers(arguments: Namespace) -> Path:
    """The file that keeps the answers of language models."""
    return arguments.answers or _beside(arguments, ".answers.jsonl")


def _benchmark(arguments: Namespace) -> Step:
    from models.curation.benchmark import Benchmark

    folder = arguments.folder or arguments.out.with_suffix("")
    out = arguments.out.resolve()
    if folder.resolve() in (out, *out.parents):
        raise CareError(f"--folder {folder}: the sets would take the place of {arguments.out}; name another folder")
    return Benchmark(arguments.files, arguments.corpus, folder, **_given(arguments, "sts"))

"""Splits development sets off training files, so that choices are made without looking at an evaluation set.

  python -m models.training.holdout TRAIN_FOLDER OUT [--group NAME=SOURCE,SOURCE …]

For each group of sources (without --group those of the bundled recipes), OUT/<group>/ is a retrieval set in BEIR's
shape: some queries and their passages among others of the same sources; a `cloze` set asks one sentence for the passage
it was cut out of. OUT/pairs.jsonl keeps every other row for training, as it was read. Queries are held out, not
documents: one of a set, also of a cloze set, stays in training in the rows of other queries. A document without a title
asks nothing and is never held out. The same files and numbers always give the same split.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.errors import BadData, CareError
from models.evaluation.sets import order, write_retrieval
from models.package import positive
from models.rows import Pair, parse_row, read_lines, write_lines

GROUPS: dict[str, tuple[str, ...]] = {
    "chip-cdn": ("chip-cdn",),
    "consult": ("toyhom", "huatuo-llama"),
    "tcm": ("tcm",),
    "chinaxiv": ("chinaxiv-abstract", "chinaxiv-section"),
    "smile": ("smile",),
    "medquad": ("medquad",),
    "queries": ("kuake-qtr", "cmedir", "covid-pairs"),
}
CLOZE_GROUPS = ("tcm", "chinaxiv")
QUERIES, DOCUMENTS = 300, 7000
"""How many of each a set has, unless others are asked for or fewer are there."""
_SENTENCE = re.compile(r"(?<=[。！？])")


Row = tuple[dict[str, Any], Pair]
"""A row as its file has it, and what it means."""


def read(files: Sequence[Path]) -> Iterator[Row]:
    """Yields the rows of the files; each names its source, which may have been its file."""
    for line in (line for path in files for line in read_lines(path)):
        parsed = parse_row(line)
        if isinstance(parsed, str):
            raise BadData(f"{line.where}: {parsed}; correct or remove the line")
        row, pair = parsed
        yield row | {"source": pair.source}, pair


def check_groups(groups: Mapping[str, Sequence[str]], there: Collection[str]) -> None:
    """Refuses a group with a source that no row is of: its set would lack it, or not be written."""
    for group, sources in groups.items():
        if missing := [source for source in sources if source not in there]:
            raise BadData(f"--group {group}: no row is of {', '.join(missing)}; there are {', '.join(sorted(there))}")


def hold_out(
    rows: Sequence[Row], out: Path, queries: int = QUERIES, documents: int = DOCUMENTS,
    groups: Mapping[str, Sequence[str]] = GROUPS,
) -> None:  # fmt: skip
    """Writes the development sets and the remaining rows; reports the sources that have no development set."""
    held: set[str] = set()
    for group, sources in groups.items():
        own = [pair for _, pair in rows if pair.source in sources and pair.query]
        if own:
            held |= _write_pairs_set(out / group, own, queries, documents)
        if own and group in CLOZE_GROUPS:
            held |= _write_cloze_set(out / f"cloze-{group}", own, queries, documents)
    write_lines(out / "pairs.jsonl", (row for row, pair in rows if pair.query not in held))
    grouped = {source for sources in groups.values() for source in sources}
    others = Counter(pair.source for _, pair in rows if pair.source not in grouped)
    if others:
        named = ", ".join(f"{source} ({count:,})" for source, count in sorted(others.items()))
        print(f"no development set of {others.total():,} rows, whose sources are in no group: {named}", file=sys.stderr)


def _write_pairs_set(folder: Path, pairs: Sequence[Pair], queries: int, documents: int) -> set[str]:
    answers: dict[str, set[str]] = {}
    for pair in pairs:
        answers.setdefault(pair.query, set()).update(pair.positives)
    chosen = sorted(answers, key=order)[:queries]
    relevant = {text for query in chosen for text in answers[query]}
    others = sorted({text for texts in answers.values() for text in texts} - relevant, key=order)
    corpus = [*sorted(relevant, key=order), *others][: max(documents, len(relevant))]
    write_retrieval(folder, corpus, [(query, answers[query]) for query in chosen])
    return set(chosen)


def _write_cloze_set(folder: Path, pairs: Sequence[Pair], queries: int, documents: int) -> set[str]:
    texts: list[str] = []
    questions: list[tuple[str, set[str]]] = []
    used: set[str] = set()
    for pair in sorted(pairs, key=lambda pair: order(pair.positives[0]))[:documents]:
        passage = pair.positives[0]
        sentences = [part for part in _SENTENCE.split(passage) if len(part) >= 12]
        if len(sentences) >= 4 and len(questions) < queries:
            sentence = min(sentences, key=order)
            passage = passage.replace(sentence, "")
            questions.append((sentence, {passage}))
            used.add(pair.query)
        texts.append(passage)
    write_retrieval(folder, list(dict.fromkeys(texts)), questions)
    return used


def _group(text: str) -> tuple[str, list[str]]:
    name, _, sources = text.partition("=")
    if not re.fullmatch(r"[\w-]+", name) or not all(found := sources.split(",")):
        raise ArgumentTypeError(f"{text!r} is not NAME=SOURCE,SOURCE; a name has letters, digits, '_' and '-'")
    return name, found


def main(arguments: Sequence[str] | None = None) -> None:
    about, _, usage = str(__doc__).partition("\n")
    form, name = RawDescriptionHelpFormatter, "python -m models.training.holdout"
    parser = ArgumentParser(name, description=about, epilog=usage, formatter_class=form)
    parser.add_argument("source", type=Path, help="folder with training files (*.jsonl, .gz or .xz)")
    parser.add_argument("out", type=Path, help="folder for the development sets and the remaining pairs")
    parser.add_argument("--queries", type=positive, default=QUERIES, help=f"of each set, at most (default {QUERIES})")
    parser.add_argument(
        "--documents", type=positive, default=DOCUMENTS, help=f"of each set, at most (default {DOCUMENTS:,})"
    )
    text = "one set of these sources, in place of all bundled groups; repeatable"
    parser.add_argument("--group", type=_group, action="append", metavar="NAME=SOURCE,…", help=text)
    options = parser.parse_args(arguments)
    names = [name for name, _ in options.group or ()]
    folders = Counter([*names, *(f"cloze-{name}" for name in names if name in CLOZE_GROUPS)])
    if twice := [name for name, count in folders.items() if count > 1]:
        parser.error(f"--group {twice[0]}: two sets of this name; give all sources of a set in one --group")
    # Not the reports that care curate writes beside its rows.
    files = sorted(path for ending in ("", ".gz", ".xz") for path in options.source.glob(f"*.jsonl{ending}"))
    if not files:
        parser.error(f"{options.source} holds no *.jsonl files")
    try:
        rows, groups = list(read(files)), dict(options.group or ())
        check_groups(groups, {pair.source for _, pair in rows})
        options.out.mkdir(parents=True, exist_ok=True)
        hold_out(rows, options.out, options.queries, options.documents, groups or GROUPS)
    except CareError as error:
        sys.exit(f"holdout: {error}")
    except OSError as error:
        sys.exit(f"holdout: {options.out}: {error.strerror}; name a folder that can be written")


if __name__ == "__main__":
    main()

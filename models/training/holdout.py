"""Splits development sets off training files, so that choices are made without looking at an evaluation set.

  python -m models.training.holdout TRAIN_FOLDER OUT

For each group of sources, OUT/<group>/ is a retrieval set in BEIR's shape: some queries and their passages among
others of the same sources; a `cloze` set asks one sentence for the passage it was cut out of. OUT/pairs.jsonl keeps
every other pair for training. The same files always give the same split.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from models.evaluation.sets import order, write_retrieval
from models.rows import Pair, read_pairs, write_lines

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
QUERIES = 300
DOCUMENTS = 7000
_SENTENCE = re.compile(r"(?<=[。！？])")


def hold_out(pairs: Sequence[Pair], out: Path) -> None:
    """Writes the development sets and the remaining pairs."""
    held: set[str] = set()
    for group, sources in GROUPS.items():
        own = [pair for pair in pairs if pair.source in sources]
        if own:
            held |= _write_pairs_set(out / group, own)
        if own and group in CLOZE_GROUPS:
            held |= _write_cloze_set(out / f"cloze-{group}", own)
    rest = (pair for pair in pairs if pair.query not in held)
    rows = ({"query": each.query, "pos": each.positives, "neg": each.negatives, "source": each.source} for each in rest)
    write_lines(out / "pairs.jsonl", rows)


def _write_pairs_set(folder: Path, pairs: Sequence[Pair]) -> set[str]:
    answers: dict[str, set[str]] = {}
    for pair in pairs:
        answers.setdefault(pair.query, set()).update(pair.positives)
    chosen = sorted(answers, key=order)[:QUERIES]
    relevant = {text for query in chosen for text in answers[query]}
    others = sorted({text for texts in answers.values() for text in texts} - relevant, key=order)
    documents = [*sorted(relevant, key=order), *others][: max(DOCUMENTS, len(relevant))]
    write_retrieval(folder, documents, [(query, answers[query]) for query in chosen])
    return set(chosen)


def _write_cloze_set(folder: Path, pairs: Sequence[Pair]) -> set[str]:
    documents: list[str] = []
    questions: list[tuple[str, set[str]]] = []
    used: set[str] = set()
    for pair in sorted(pairs, key=lambda pair: order(pair.positives[0]))[:DOCUMENTS]:
        passage = pair.positives[0]
        sentences = [part for part in _SENTENCE.split(passage) if len(part) >= 12]
        if len(sentences) >= 4 and len(questions) < QUERIES:
            sentence = min(sentences, key=order)
            passage = passage.replace(sentence, "")
            questions.append((sentence, {passage}))
            used.add(pair.query)
        documents.append(passage)
    write_retrieval(folder, list(dict.fromkeys(documents)), questions)
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    about, _, usage = str(__doc__).partition("\n")
    form, name = RawDescriptionHelpFormatter, "python -m models.training.holdout"
    parser = ArgumentParser(name, description=about, epilog=usage, formatter_class=form)
    parser.add_argument("source", type=Path, help="folder with training files (*.jsonl, .gz or .xz)")
    parser.add_argument("out", type=Path, help="folder for the development sets and the remaining pairs")
    given = parser.parse_args(arguments)
    files = sorted(given.source.glob("*.jsonl*"))
    if not files:
        parser.error(f"{given.source} holds no *.jsonl files")
    given.out.mkdir(parents=True, exist_ok=True)
    hold_out([pair for path in files for pair in read_pairs(path)], given.out)


if __name__ == "__main__":
    main()

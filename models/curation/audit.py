"""Audits a retrieval set: judges the documents that search finds first, and counts wrong labels (CARE's table 20).

Four steps in a row, with the files of each beside OUT: a killed audit goes on where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from models.curation.convert import Convert
from models.curation.frame import Files, read_json, run_step
from models.curation.judge import JudgeRows
from models.curation.mine import DEPTH, Pool
from models.curation.search import Retrievers
from models.evaluation.sets import find_corpus

COLUMNS = {
    "queries": "queries", "positives": "labelled positives a query", "judged_positives": "judged positives a query",
    "false_positives": "false positives a query", "false_negatives": "false negatives a query",
    "agreement": "agreement of labels and judges", "kappa": "their kappa",
}  # fmt: skip


def run_audit(
    folder: Path, out: Path, search: Callable[[Path], Retrievers], judge: JudgeRows, *, split: str, depth: int = DEPTH
) -> None:
    """Writes OUT, the judged rows, and its report; `folder` has BEIR's shape, and `search` opens its corpus."""
    given = find_corpus(folder)
    labels, corpus, pooled = (out.parent / f"{out.name}.{name}.jsonl" for name in ("labels", "corpus", "pooled"))
    last = Files([pooled], out, kept=[judge.answers])
    run_step(Convert("beir", split), Files([folder / "queries.jsonl"], labels))
    run_step(Convert("beir-corpus"), Files([given], corpus))
    run_step(Pool(search(corpus), depth), Files([labels], pooled, [corpus]))
    run_step(judge, last, unprinted=("labels",))
    print(table(read_json(last.report)["labels"]), file=sys.stderr)  # also if the audit was complete already


def table(labels: Mapping[str, float | None]) -> str:
    """The columns of table 20, and the agreement, for a terminal; kappa is None if it is not defined."""
    found = {words: labels.get(name) for name, words in COLUMNS.items()}
    return "\n".join(f"{value:>10.4g}  {words}" for words, value in found.items() if value is not None)

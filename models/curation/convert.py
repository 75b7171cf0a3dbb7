"""Public sets, in the formats in which they are published, as rows: BMRetriever's tables 8 and 9, and BEIR folders."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from models.curation.frame import Outcome, Step
from models.curation.rows import Row
from models.errors import BadData
from models.evaluation.sets import load_retrieval
from models.rows import every_line, read_lines

Record = dict[str, Any]
RECORD = "record"


@dataclass(frozen=True)
class Format:
    """How a record becomes a row; an error in it means that the record has another form."""

    row: Callable[[Any], Row]
    instruction: str = ""
    """In our words; a model that was published with others expects those."""
    columns: Sequence[str] = ()
    """Names of the columns of a file that has none itself."""
    joined_by: str = ""
    """The field that neighbouring records share which make one row; `row` takes a list of them."""


def _document(title: str, *texts: str) -> Callable[[Record], Row]:
    """A document: `title` and the first of the fields that holds a text."""

    def row(record: Record) -> Row:
        text = next(record[name] for name in texts if record.get(name))
        heading = str(record.get(title) or "").strip() if title else ""
        return {"title": heading, "text": text.strip()} if heading else {"text": text.strip()}

    return row


def _titled(record: Record) -> Row:
    """A document with its title in the text, as retrieval sets are read."""
    return {"text": "\n".join(filter(None, (record.get("title"), record["text"])))}


def _pair(query: str, answer: str) -> Callable[[Record], Row]:
    return lambda record: {"query": record[query].strip(), "pos": [record[answer].strip()]}


def _labelled(first: str, second: str, label: str, same: str, other: str) -> Callable[[list[Record]], Row]:
    """Pairs of sentences that share the first one: a label makes the second a positive, another a negative."""

    def texts(records: list[Record], wanted: str) -> list[str]:
        return [record[second].strip() for record in records if str(record[label]).strip() == wanted]

    return lambda records: {
        "query": records[0][first].strip(), "pos": texts(records, same), "neg": texts(records, other)
    }  # fmt: skip


def _dialogue(record: Record) -> Row:
    """The patient's turn and the doctor's, as `utterances`, or as an instruction's `input` and `output`."""
    if "utterances" in record:
        asked, answered, *_ = (str(turn).partition(":")[2].strip() for turn in record["utterances"])
        return {"query": asked, "pos": [answered]}
    return _pair("input", "output")(record)


def _best_answer(record: Record) -> Row:
    answers = record["answers"]
    best = max(range(len(answers["text"])), key=lambda at: answers["score"][at])
    return {"query": record["title"].strip(), "pos": [answers["text"][best].strip()]}


def _passages(record: Record) -> Row:
    def texts(name: str) -> list[str]:
        return [f"{found['title']}\n{found['text']}".strip() for found in record.get(name) or []]

    return {"query": record["question"], "pos": texts("positive_ctxs"), "neg": texts("hard_negative_ctxs")[:1]}


def _triple(query: str, positive: str, negative: str) -> Callable[[Record], Row]:
    return lambda record: {**_pair(query, positive)(record), "neg": [record[negative].strip()]}


ROWS: dict[str, Callable[..., Callable[[Any], Row]]] = {
    "document": _document, "titled": lambda: _titled, "pair": _pair, "triple": _triple, "labelled": _labelled,
    "dialogue": lambda: _dialogue, "best answer": lambda: _best_answer, "passages": lambda: _passages,
    "given": lambda: lambda record: record,
}  # fmt: skip


def _format(row: Sequence[str], **facts: Any) -> Format:  # noqa: ANN401 - fields of Format
    kind, *names = row
    return Format(ROWS[kind](*names), **facts)


_TABLE = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
FORMATS = {name: _format(**facts) for name, facts in _TABLE.items()}
FOLDERS = ("beir", "fever")


@dataclass(frozen=True)
class Convert(Step):
    """Reads Parquet, JSON lines, JSON lists, CSV and TSV; a row gets the format's name as source."""

    format: str
    split: str = "test"
    """Of a BEIR folder."""

    name = "convert"

    def parameters(self) -> dict[str, Any]:
        return {"format": self.format, "split": self.split, "instruction": FORMATS[self.format].instruction}

    def count_rows(self, files: Sequence[Path]) -> int | None:
        return None

    def read(self, files: Sequence[Path]) -> Iterator[Row | None]:
        """Records as they are published, each in a row of its own."""
        form = FORMATS[self.format]
        for path in files:
            if self.format in FOLDERS:
                records: Iterator[Any] = _judged(path.parent, self.split)
            elif form.joined_by:
                shared = groupby(_records(path, form.columns), partial(_value, name=form.joined_by))
                records = (list(neighbours) for _, neighbours in shared)
            else:
                records = _records(path, form.columns)
            try:
                yield from ({RECORD: record} for record in records)
            except (ValueError, csv.Error) as error:
                raise BadData(f"{path}: damaged, or not what its ending says: {error}; fetch the file again") from error

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        form = FORMATS[self.format]
        for given in rows:
            try:
                row = form.row(given[RECORD])
                texts = [row.get("text", row.get("query")), *row.get("pos", ["-"])]
            except (LookupError, TypeError, AttributeError, StopIteration, ValueError):
                yield Outcome(dropped=f"not a record of {self.format}")
                continue
            if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
                yield Outcome(dropped="no positive, or an empty text")
            else:
                if "neg" in row:  # an empty one is none
                    row = {**row, "neg": [text for text in row["neg"] if text]}
                wording = {"instruction": form.instruction} if form.instruction else {}
                yield Outcome([{**row, "source": self.format, **wording}])


def _judged(folder: Path, split: str) -> Iterator[Row]:
    """The queries of a BEIR folder with the documents that answer them."""
    data = load_retrieval(folder, split)
    for query, answers in zip(data.queries, data.answers(), strict=True):
        yield {"query": query, "pos": [data.documents[row] for row in answers if data.documents[row]]}


def _records(path: Path, columns: Sequence[str]) -> Iterator[Record | None]:
    """The records of a file, None for a line that is none.

    `columns` name those of lists and of tables without a header.
    """
    kind = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    if kind == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(1024):
            # Dates, bytes and decimals as texts: reports and samples are JSON.
            yield from (json.loads(json.dumps(record, default=str)) for record in batch.to_pylist())
        return
    if kind in (".csv", ".tsv"):
        csv.field_size_limit(1 << 27)
        # MS MARCO's triples are split at tabs alone: quotes in them mean nothing.
        plain: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
        table = csv.reader(_table_lines(path), **plain)
        names = list(columns) or next(table, [])
        yield from (dict(zip(names, line, strict=False)) for line in table if line != names)
        return
    if kind not in (".json", ".jsonl"):
        raise BadData(f"{path}: write it as .parquet, .jsonl, .json, .csv or .tsv (these plain or .gz)")
    lines = read_lines(path)
    first = next(lines, None)
    if first is not None and first.text.startswith("[") and kind == ".json":
        yield from json.loads("".join(line.text for line in chain([first], lines)))
        return
    yield from (_named(line.text, columns) for line in chain(filter(None, [first]), lines))


def _table_lines(path: Path) -> Iterator[str]:
    """The lines of a table, which may end in a carriage return alone; blank ones may be part of a field."""
    for line in every_line(path):
        yield from StringIO(line.text, newline="")


def _named(line: str, columns: Sequence[str]) -> Record | None:
    """The record of a line; None for a line that holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, list):
        return dict(zip(columns, record, strict=False))
    return record if isinstance(record, dict) else None


def _value(record: Record | None, name: str) -> Any:  # noqa: ANN401 - whatever the record holds
    return record and record.get(name)

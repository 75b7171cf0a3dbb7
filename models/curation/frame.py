"""Runs a curation step over files: resumes after a kill, shows progress, tallies what was kept and why not the rest.

OUT.part grows with the output; every SAVE_EVERY_ROWS rows OUT.part.json records how far it goes, so that a killed run
continues there and ends with the same bytes. At the end OUT.part becomes OUT, and OUT.report.json says what happened.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from typing import IO, Any, ClassVar

from models.curation.rows import CURATED, NOT_A_ROW, Row, read_rows, whole_text
from models.errors import BadData, CareError
from models.progress import Progress
from models.rows import read_lines, write_lines

SAVE_EVERY_ROWS = 1000
SAMPLES, SAMPLE_CHARACTERS = 3, 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step makes of one row: rows, or the reason why it is dropped."""

    rows: Sequence[Row] = ()
    dropped: str = ""
    notes: Mapping[str, int] = field(default_factory=dict)
    """Counts for the report: {"phone numbers masked": 2}."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """What a person should look at in a row: {reason: excerpt}."""


class Step(ABC):
    """One step. `apply` is deterministic, and gives an outcome for each row, in order; it may read ahead."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised when the same parameters give other rows."""
    block: ClassVar[int] = 1
    """Rows that `apply` takes together. A killed run goes on at the beginning of a block, so that blocks, and with them
    the batches of an encoder, are the same in every run."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """All that the output depends on beside the rows, as JSON."""

    @abstractmethod
    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]: ...

    def read(self, files: Sequence[Path]) -> Iterator[Row | None]:
        """The rows of the files; None for what is none."""
        return read_rows(files)

    def count_rows(self, files: Sequence[Path]) -> int | None:
        """How many rows `read` gives, for the time left; None if that takes as long as the work."""
        return sum(1 for path in files for _ in read_lines(path))

    def resume(self, seen: int, made: Iterator[Row]) -> None:  # noqa: B027 - most steps depend on nothing before
        """Takes in what the step did before: the outcomes that it gave, and the rows in them. Called before `apply`."""

    def facts(self, tally: Tally) -> dict[str, Any]:
        """More for the report."""
        return {}

    def finish(self, out: Path) -> None:  # noqa: B027 - most steps leave one file
        """Writes what else the step makes of its output, and removes what it needed on the way."""

    def provenance(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, "parameters": digest(self.parameters())}


@dataclass(slots=True)
class Tally:
    """What a run has done so far; saved with its position."""

    rows_in: int = 0
    rows_out: int = 0
    bytes_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    flagged: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)
    """The first few texts that were dropped or flagged, by reason."""
    changed: list[Sequence[Any]] = field(default_factory=list)
    """(hash, row before, rows after) of the lowest hashes: an even sample of all, the same in every run."""

    @property
    def seen(self) -> int:
        """Rows for which the step gave an outcome."""
        return self.rows_in - self.dropped[NOT_A_ROW]

    def count(self, row: Row | None, outcome: Outcome, sample: int) -> None:
        self.rows_in += 1
        self.rows_out += len(outcome.rows)
        self.notes.update(outcome.notes)
        if outcome.dropped:
            self.dropped[outcome.dropped] += 1
            self._show(outcome.dropped, whole_text(row) if row else "")
        for reason, excerpt in outcome.flags.items():
            self.flagged[reason] += 1
            self._show(reason, excerpt)
        if sample and row is not None and [row] != list(outcome.rows):
            self.changed.append((digest(row), row, list(outcome.rows)))
            self.changed = sorted(self.changed, key=lambda each: each[0])[:sample]

    def _show(self, reason: str, text: str) -> None:
        shown = self.samples.setdefault(reason, [])
        if text and len(shown) < SAMPLES:
            shown.append(text[:SAMPLE_CHARACTERS])

    @staticmethod
    def load(saved: Mapping[str, Any]) -> Tally:
        """The tally of a position or a report."""
        known = {name: saved[name] for name in Tally.__slots__ if name in saved}
        counters = {name: Counter(known[name]) for name in ("dropped", "notes", "flagged")}
        return Tally(**{**known, **counters})

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def digest(value: object) -> str:
    """Names a JSON value in 16 digits."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def in_blocks(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """Lists of `size` rows, the last one shorter."""
    return iter(lambda: list(islice(rows, size)), [])


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one run."""

    inputs: Sequence[Path]
    out: Path
    others: Sequence[Path] = ()
    """What the step reads beside its inputs."""
    kept: Sequence[Path] = ()
    """What the step writes beside its output."""

    def __post_init__(self) -> None:
        if not self.out.name or self.out.is_dir():
            raise CareError(f"--out {self.out}: a folder; give the name of a file in it")
        own = (self.out, self.part, self.position, self.report, self.sample)
        for path, made in product((*self.inputs, *self.others), (*own, *self.kept)):
            if path.exists() and made.exists() and path.samefile(made):
                raise CareError(f"{path}: is read and would be overwritten; give another --out")
        for path, made in product(self.kept, own):
            if path.resolve() == made.resolve():
                raise CareError(f"{path}: would be overwritten by the output; give another --answers")

    def beside(self, ending: str) -> Path:
        return self.out.with_name(self.out.name + ending)

    @property
    def part(self) -> Path:
        return self.beside(".part")

    @property
    def position(self) -> Path:
        return self.beside(".part.json")

    @property
    def report(self) -> Path:
        return self.beside(".report.json")

    @property
    def sample(self) -> Path:
        return self.beside(".sample.jsonl")

    def identity(self) -> list[list[object]]:
        """Name, size and time of every input: a file that changed is read from its beginning."""
        facts = [(path, path.stat()) for path in self.inputs]
        return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in facts]


def run_step(step: Step, files: Files, *, sample: int = 0, unprinted: Collection[str] = ()) -> Tally:
    """Writes OUT and its report, going on where a killed run stopped; does nothing if both are complete already.

    `sample` rows that the step changed are written to OUT.sample.jsonl, before and after, for a person to read.
    Facts that are `unprinted` are in the report only.
    """
    for path in files.inputs:
        if not path.is_file():
            raise BadData(f"{path}: no such file; give JSON lines, plain, .gz or .xz")
    run = {"step": step.name, "version": step.version, "parameters": step.parameters(), "sample": sample,
           "inputs": files.identity()}  # fmt: skip
    files.out.parent.mkdir(parents=True, exist_ok=True)
    with files.part.open("ab") as part:
        hold(part, files.part, "--out")
        if files.out.exists():  # a process that finishes its work holds OUT.part under this name
            with files.out.open("rb") as out:
                hold(out, files.out, "--out")
        finished = read_json(files.report)
        if files.out.exists() and finished.get("run") == run:
            print(f"{files.out}: complete already; delete it to make it again", file=sys.stderr)
            files.part.unlink(missing_ok=True)
            return Tally.load(finished)
        saved = read_json(files.position)
        if saved and saved.get("run") != run:
            print(f"{files.part}: begun with other parameters or inputs: from the beginning", file=sys.stderr)
        goes_on = saved.get("run") == run and saved["bytes_out"] <= files.part.stat().st_size
        tally = Tally.load(saved) if goes_on else Tally()
        part.truncate(tally.bytes_out)
        part.seek(0, os.SEEK_END)
        _go_on(step, files, part, tally, run)
        facts = step.facts(tally)
        _put_in_place(step, files, {"run": run, **tally.as_json(), **facts})
    printed = {name: value for name, value in facts.items() if name not in unprinted}
    print(table(step.name, files.out, tally, printed), file=sys.stderr)
    return tally


def hold(file: IO[bytes], path: Path, option: str) -> None:
    """Locks an open file until it is closed; CareError if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CareError(f"{path}: another process writes it; wait for it or give another {option}") from error


def _go_on(step: Step, files: Files, part: IO[bytes], tally: Tally, run: Mapping[str, Any]) -> None:
    with files.part.open(encoding="utf-8") as written:
        step.resume(tally.seen, (json.loads(line) for line in written))
    stamp = step.provenance()
    rows = islice(step.read(files.inputs), tally.rows_in, None)
    total, saved = step.count_rows(files.inputs), tally.rows_in
    progress = Progress(f"curate {step.name}", "rows", total, first=saved)
    for row, outcome in progress.over(_outcomes(step, rows)):
        for made in outcome.rows:
            before = made.get(CURATED, [])
            stamped = {**made, CURATED: [*(before if isinstance(before, list) else [before]), stamp]}
            tally.bytes_out += part.write(json.dumps(stamped, ensure_ascii=False).encode(errors="replace") + b"\n")
        tally.count(row, outcome, run["sample"])
        if tally.rows_in - saved >= SAVE_EVERY_ROWS and tally.seen % step.block == 0:
            part.flush()
            os.fsync(part.fileno())
            write_lines(files.position, [{"run": run, **tally.as_json()}])
            saved = tally.rows_in
    part.flush()
    os.fsync(part.fileno())


def _outcomes(step: Step, rows: Iterable[Row | None]) -> Iterator[tuple[Row | None, Outcome]]:
    """Each row with its outcome, also the lines that are no rows, which the step never sees."""
    pending: list[Row | None] = []

    def real() -> Iterator[Row]:
        for row in rows:
            pending.append(row)
            if row is not None:
                yield row

    for outcome in step.apply(real()):
        while (row := pending.pop(0)) is None:
            yield None, Outcome(dropped=NOT_A_ROW)
        yield row, outcome
    yield from ((None, Outcome(dropped=NOT_A_ROW)) for _ in pending)


def _put_in_place(step: Step, files: Files, report: dict[str, Any]) -> None:
    """Gives the output its name; the report comes last, because it stands for a complete output."""
    changed = report.pop("changed")
    if report["run"]["sample"]:
        write_lines(files.sample, ({"before": old, "after": new} for _, old, new in changed))
    files.report.unlink(missing_ok=True)
    os.replace(files.part, files.out)
    step.finish(files.out)
    write_lines(files.report, [report])
    files.position.unlink(missing_ok=True)


def table(name: str, out: Path, tally: Tally, facts: Mapping[str, Any]) -> str:
    """What happened, for a terminal."""
    lines = [f"curate {name}: {tally.rows_in:,} rows in, {tally.rows_out:,} out: {out}"]
    for title, counts in (("dropped", tally.dropped), ("flagged", tally.flagged), ("", tally.notes)):
        lines += [f"{title:>9} {count:>10,}  {reason}" for reason, count in counts.most_common()]
    for title, value in facts.items():
        short = json.loads(json.dumps(value), parse_float=lambda digits: round(float(digits), 4))
        lines.append(f"{'':>21} {title}: {json.dumps(short, ensure_ascii=False)}")
    return "\n".join(lines)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

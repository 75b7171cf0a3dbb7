"""Writers, builds, publications and rollbacks, killed with SIGKILL at random: no acknowledged change may be lost.

  python -m tests.support.write_kills                   300 runs, a seed each
  python -m tests.support.write_kills --runs 1 --seed 7       one of them again

A run is a collection and a few rounds. In each round two writers post and delete through the service's FreshWriter
while the next corpus is built and published. Each process may be killed, at a random disk operation or
at a random time. Then a rollback may follow, which may be killed, too. At the end a build must succeed, and the
documents of every version under the log must be those that were acknowledged. Only the encoder is a stand-in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from indexer.store.filters import kind_of
from indexer.store.fresh_log import Cursor, FreshLog, NewDocument, Posted
from indexer.store.overlay import passages_of
from models.encoder.spec import Side
from models.lexical import query_terms
from service.errors import FreshLimit, InvalidRequest
from service.metrics import Metrics
from service.serving.serving import Models, Serving
from service.settings import Settings
from service.updates.encoder import DocumentEncoder, freshen
from service.updates.swap import Opening, Servings
from service.updates.writer import FreshWriter
from tests.support.fast_encoder import BUNDLED, FastEncoder

WRITERS = 2
LIMIT = 14
LIMIT_SECONDS = 120.0
MEETING_SECONDS = 0.4
REFUSED = -1
# Approximate numbers of disk operations of a build, a writer and a rollback, among which a kill may fall.
BUILD_OPERATIONS, WRITER_OPERATIONS, ROLLBACK_OPERATIONS = 130, 60, 14
# In every corpus, in later ones, in none; the last kind has a field whose kind two writers dispute.
ALWAYS = [f"always-{number}" for number in range(5)]
LATER = [f"later-{number}" for number in range(3)]
POSTED = [f"posted-{number}" for number in range(4)]
DISPUTED = [f"disputed-{number}" for number in range(3)]
OPTIONS = BuildOptions(passage_tokens=64, overlap=8, shard_texts=4)
LONG = "很长的正文。" * 20

ENCODER = FastEncoder(remember=False)


@dataclass(frozen=True)
class Operation:
    """An attempt of a writer; `position` is None if it was killed meanwhile, `text` is None for a deletion."""

    round: int
    id: str
    text: str | None
    position: int | None = None
    snapshot: str = ""


@dataclass
class Run:
    """Events of one collection, as far as its processes reported them."""

    root: Path
    served: set[str] = field(default_factory=set)
    operations: list[Operation] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def collection(self) -> Collection:
        return Collection(self.root / "collection")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first run (%(default)s)")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    query_terms("词典")  # loads the dictionary once, before processes are forked
    began = time.monotonic()
    runs = []
    memory = Path("/dev/shm")  # a kill loses nothing that was written, so memory suffices
    with tempfile.TemporaryDirectory(prefix="care-writes-", dir=memory if memory.is_dir() else None) as folder:
        tempfile.tempdir = folder  # killed processes leave their files behind
        first = _prepare(Path(folder, "first"))
        for seed in range(given.seed, given.seed + given.runs):
            runs.append(run_once(seed, first, Path(folder, f"run-{seed}")))
            for problem in runs[-1].problems:
                print(f"seed {seed}: {problem}", flush=True)
    acknowledged = sum(operation.position is not None for run in runs for operation in run.operations)
    killed = sum((run.killed for run in runs), Counter())
    print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s: {acknowledged} changes acknowledged, "
          f"{sum(run.refused for run in runs)} refused; killed: "
          + ", ".join(f"{count} {what}" for what, count in sorted(killed.items())))  # fmt: skip
    failed = sum(bool(run.problems) for run in runs)
    print(f"{failed} runs failed" if failed else "no acknowledged change lost, no build stopped by one")
    return 1 if failed else 0


def run_once(seed: int, first: Path, root: Path) -> Run:
    draw = random.Random(seed)
    shutil.copytree(first, root)
    run = Run(root, served={str(Collection(root / "collection").current())})
    rounds = draw.randint(2, 3)
    for number in range(rounds):
        _round(run, draw, number)
        _check_served(run)
        if draw.random() < 0.5 and not run.problems:
            _play(run, draw, "rollbacks", lambda: _roll_back(run), ROLLBACK_OPERATIONS)
            _check_served(run)
    if not run.problems:
        _play(run, None, "builds", lambda: _build(run, rounds), 0)
        _check_served(run)
        _play(run, None, "checks", lambda: _check(run), 0)
    if not run.problems:
        shutil.rmtree(root)
    return run


def _round(run: Run, draw: random.Random, number: int) -> None:
    """Two writers and a build at once."""
    files = [run.root / f"round-{number}-writer-{writer}.jsonl" for writer in range(WRITERS)]
    writers = [partial(_write, run, number, draw.random(), file) for file in files]
    children = [_start(draw, lambda write=write: asyncio.run(write()), WRITER_OPERATIONS) for write in writers]
    children.append(_start(draw, lambda: _build(run, number), BUILD_OPERATIONS))
    for child, what in zip(children, [*["writers"] * WRITERS, "builds"], strict=True):
        _end(run, child, what)
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        reported = [Operation(**json.loads(line)) for line in lines]
        run.refused += sum(each.position == REFUSED for each in reported)
        run.operations += [each for each in reported if each.position not in (None, REFUSED)]
        run.operations += [each for each in reported[-1:] if each.position is None]  # unfinished when it was killed


def _play(run: Run, draw: random.Random | None, what: str, work: Callable[[], None], operations: int) -> None:
    _end(run, _start(draw, work, operations), what)


# Processes


@dataclass(frozen=True)
class _Child:
    pid: int
    kill_at: float
    output: Path


def _start(draw: random.Random | None, work: Callable[[], None], operations: int) -> _Child:
    """Forks a process that does the work; `draw` decides whether and when it is killed."""
    fate = draw.random() if draw else 1.0
    kill_at = time.monotonic() + draw.uniform(0, 0.6) if draw and fate < 0.35 else float("inf")
    operation = draw.randint(1, operations) if draw and 0.35 <= fate < 0.7 else None
    output = Path(tempfile.mkstemp(prefix="care-writes-")[1])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with output.open("w", encoding="utf-8") as file, contextlib.redirect_stderr(file):
                if operation is not None:
                    _kill_at_operation(operation)
                try:
                    work()
                    code = 0
                except BaseException:
                    traceback.print_exc()
        finally:
            os._exit(code)
    return _Child(pid, kill_at, output)


def _end(run: Run, child: _Child, what: str) -> None:
    """Waits for a process, or kills it at its time; a process that was not killed must have succeeded."""
    limit = time.monotonic() + LIMIT_SECONDS
    while (ended := os.waitpid(child.pid, os.WNOHANG))[0] == 0:
        if time.monotonic() >= min(child.kill_at, limit):
            os.kill(child.pid, signal.SIGKILL)
            ended = os.waitpid(child.pid, 0)
            break
        time.sleep(0.002)
    status = os.waitstatus_to_exitcode(ended[1])
    if status == -signal.SIGKILL and time.monotonic() < limit:
        run.killed[what] += 1
    elif status:
        output = child.output.read_text(encoding="utf-8").strip()
        run.problems.append(f"{what} ended with {status}: {output[-1500:]}")
    child.output.unlink()


def _kill_at_operation(operation: int) -> None:
    """Makes the kernel kill this process before its n-th disk operation."""
    left = operation

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    fsync = os.fsync

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if opened or event in ("os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"):
            count()

    os.fsync = counted
    sys.addaudithook(hook)


# The work of the processes


def _corpus(root: Path, generation: int) -> Path:
    """Writes the same documents with new texts each time, and one more; `anchor` names the generation."""
    path = root / f"corpus-{generation}.jsonl"
    rows = [{"_id": "anchor", "text": str(generation)}]
    rows += [{"_id": each, "text": _corpus_text(each, generation)} for each in ALWAYS + LATER[:generation]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _corpus_text(document_id: str, generation: int) -> str:
    return f"corpus {generation} {document_id}"


def _prepare(root: Path) -> Path:
    """Builds a collection with one published version in another process: threads do not survive a fork."""
    run = Run(root)
    root.mkdir()
    _play(run, None, "builds", lambda: _build(run, 0), 0)
    if run.problems:
        raise AssertionError(run.problems)
    return root


def _build(run: Run, generation: int) -> None:
    summary = build([_corpus(run.root, generation)], ENCODER, run.collection, OPTIONS)
    run.collection.publish(summary.version)


def _roll_back(run: Run) -> None:
    if run.collection.previous() is not None:
        run.collection.rollback()


async def _write(run: Run, number: int, seed: float, file: Path) -> None:
    """Records each attempt before it starts and its result afterwards; both survive a kill."""
    draw = random.Random(seed)
    servings, writer = _service(run)
    record = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    await servings.start()
    _meet(file)
    for step in range(draw.randint(2, 6)):
        if step and draw.random() < 0.3:
            await servings.follow_now()
        disputes = step == 0 and draw.random() < 0.7
        document_id = draw.choice(DISPUTED if disputes else ALWAYS + LATER + POSTED + DISPUTED)
        deletes = document_id in LATER or (document_id not in DISPUTED and draw.random() < 0.4)
        text = None if deletes else f"{number} {step} {seed} {LONG if draw.random() < 0.3 else ''}"
        metadata = {"zz": draw.choice([5, "five"])} if document_id in DISPUTED else {}
        facts = {"round": number, "id": document_id, "text": text}
        os.write(record, f"{json.dumps(facts)}\n".encode())
        try:
            if text is None:
                receipt = await writer.delete(document_id)
            else:
                receipt = await writer.post([NewDocument(document_id, "", text, metadata)])
        except (FreshLimit, InvalidRequest):
            facts |= {"position": REFUSED}
        else:
            facts |= {"position": receipt.position, "snapshot": receipt.snapshot}
        os.write(record, f"{json.dumps(facts)}\n".encode())


def _meet(file: Path) -> None:
    """Waits a moment for the other writers of the round, so that their first changes are concurrent."""
    file.with_suffix(".ready").touch()
    others, end = file.name.rpartition("-")[0], time.monotonic() + MEETING_SECONDS
    while len(list(file.parent.glob(f"{others}-*.ready"))) < WRITERS and time.monotonic() < end:
        time.sleep(0.001)


class _Embedder:
    """The stand-in for the encoder, in place of the service's engine."""

    async def embed(self, serving: Serving, texts: Sequence[str], side: Side, *, deadline: object) -> SimpleNamespace:
        return SimpleNamespace(vectors=ENCODER.encode(texts, side))


def _service(run: Run) -> tuple[Servings, FreshWriter]:
    """Makes the parts of a service that change documents, connected as in `service.runtime`."""
    root = run.root / "collection"
    settings = Settings(collection=root, encoder=BUNDLED, fresh_limit=LIMIT)
    documents = DocumentEncoder(settings, _Embedder())  # type: ignore[arg-type]
    log = Collection(root).fresh_log

    async def nothing(serving: Serving, canaries: object = None) -> None:
        return None

    models = Models(ENCODER)  # type: ignore[arg-type]

    def opened(folder: Path, encoder: Any, reranker: None) -> Serving:  # noqa: ANN401
        return Serving.open(folder, encoder, verify=False, searched=False)

    opening = Opening(lambda: models, opened, nothing, partial(freshen, log, documents), nothing, nothing)
    servings = Servings(settings, Metrics(), models, opening)
    return servings, FreshWriter(settings, servings, documents, log)


# Checks


def _check_served(run: Run) -> None:
    """Checks that the versions in PUBLISHED were served: one process publishes at a time, so CURRENT names them."""
    run.served.add(str(run.collection.current()))
    named = set((run.collection.root / "PUBLISHED").read_text(encoding="utf-8").split())
    if not named <= run.served:
        run.problems.append(f"PUBLISHED names what was never served: {sorted(named - run.served)}")
    if (target := run.collection.previous()) is not None and target not in run.served:
        run.problems.append(f"a rollback would go to {target}, which was never served")


def _check(run: Run) -> None:
    """Checks that every version, under the log, shows the acknowledged changes. Runs in a separate process."""
    collection = run.collection
    frames, _ = FreshLog(collection.root / "fresh").read(Cursor(0))
    servings, _ = _service(run)
    versions = {}
    for version in collection.versions():
        opened = Serving.open(collection.folder(version), ENCODER, searched=False)  # type: ignore[arg-type]
        versions[version] = asyncio.run(servings._opening.freshen(opened))
    problems = [*_check_frames(run, frames, versions)]
    for version, serving in versions.items():
        for document_id in ALWAYS + LATER + POSTED + DISPUTED:
            row = serving.overlay.row_of(document_id)
            shown = None if row is None else serving.overlay.document(row).text
            allowed = _allowed(run, document_id, serving, versions)
            if shown not in allowed:
                problems.append(f"{version} shows {document_id} as {shown!r}, not as one of {allowed}")
    if problems:
        raise AssertionError("; ".join(problems))


def _check_frames(run: Run, frames: Sequence[Any], versions: dict[str, Serving]) -> Iterator[str]:
    """Checks that fields had one kind at each moment, and that the limit was kept by every accepted change."""
    kinds: dict[str, str] = {}  # of the disputed documents, which are never deleted
    for frame in frames:
        for change in frame.changes:
            if isinstance(change, Posted) and "zz" in change.metadata:
                kinds[change.id] = kind_of(change.metadata["zz"])
        if len(set(kinds.values())) > 1:
            yield f"zz is of two kinds at position {frame.position}: {kinds}"
    for operation in run.operations:
        if operation.position is None or operation.text is None:
            continue
        included = versions[operation.snapshot].snapshot.manifest.fresh.position
        beyond = [frame for frame in frames if included < frame.position <= operation.position]
        if sum(map(passages_of, beyond)) > LIMIT:
            yield f"{sum(map(passages_of, beyond))} passages were taken over {operation.snapshot}, {LIMIT} may be"


def _allowed(run: Run, document_id: str, serving: Serving, versions: dict[str, Serving]) -> set[str | None]:
    """Returns the texts that a version may show for a document."""
    in_corpus = _in_corpus(document_id, serving)
    own = [each for each in run.operations if each.id == document_id]
    known = [each for each in own if each.position is not None]
    last = max(known, key=lambda each: each.position or 0, default=None)
    # An unfinished change of an earlier round came before the last change.
    unknown = [each for each in own if each.position is None and (last is None or each.round >= last.round)]
    allowed = {each.text for each in unknown}
    if any(each.text is not None for each in unknown):
        allowed.add(in_corpus)  # a build took it in, and the next one used the text of the corpus
    if last is None:
        return allowed | {in_corpus}
    allowed.add(last.text)
    included = serving.snapshot.manifest.fresh.position
    if included >= (last.position or 0):
        taken_in = [each for each in versions.values() if each.snapshot.manifest.fresh.position >= (last.position or 0)]
        if last.text is not None and in_corpus is not None:
            allowed.add(in_corpus)
        if last.text is None and any(_in_corpus(document_id, each) is None for each in taken_in):
            allowed.add(in_corpus)  # a corpus dropped it after it was deleted; a later one has it
    return allowed


def _in_corpus(document_id: str, serving: Serving) -> str | None:
    """Returns the document's text in the corpus of a version."""
    row = serving.snapshot.documents.row_of("anchor")
    generation = int(serving.snapshot.documents.get(row or 0).text)
    return _corpus_text(document_id, generation) if document_id in ALWAYS + LATER[:generation] else None


if __name__ == "__main__":
    sys.exit(main())

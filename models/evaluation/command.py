"""Judge encoders, pairs of them, BM25, hybrids or a running service on evaluation sets, and print the papers' table.

care eval examples
care eval DATA --encoder models/pretrained/care-small-zh --encoder CHECKPOINT,pooling=mean --no-hybrid
care eval cmirb bmretriever --data DATA --pair QUERY_ENCODER DOCUMENT_ENCODER --baseline BM25 --save run.json.gz
care eval DATA --fusion scores reciprocal --weight 0.3 0.5 0.7
care eval DATA --reranker my-reranker --rerank-depth 20
care eval DATA/cmirb/cslrel --service http://127.0.0.1:8000
care eval diff A.json.gz B.json.gz

An encoder is a folder, with `,name=value` behind it where the folder does not say how it is used: pooling=cls|eos|mean
and max_length for a transformers checkpoint, variant=fp32|fp16|int8 for ONNX graphs, dtype=float32|bfloat16|float16 for
torch, precision=bf16|fp32|fp8 for torch weights as the indexer reads them (share=0.65 for two joined encoders),
device=cpu|cuda. A service may be given ,mode=dense|lexical|hybrid.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from models.errors import BadData, CareError
from models.evaluation import benchmarks, significance, studies
from models.evaluation.benchmarks import loader
from models.evaluation.judge import Judgement, check_libraries, judge, mean_systems
from models.evaluation.lineup import Lineup, LineupOptions
from models.evaluation.report import page, tables
from models.evaluation.results import Curve, Run, SetResult
from models.evaluation.sets import RetrievalSet, Task, find_tasks
from models.fusion import Fusion
from models.package import BUNDLED_ENCODER, positive, share
from models.progress import Progress

ENCODER = str(BUNDLED_ENCODER)
CACHE = Path("var/embeddings")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sets", nargs="*", help="folders with evaluation sets, or names of benchmarks (--list)")
    parser.add_argument("--data", type=Path, help="folder in which benchmarks look for their sets first")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and their sets, and stop")
    parser.add_argument("--instructions", action="store_true", help="ask as the benchmark instructs, not the encoder")
    add = parser.add_argument_group("systems").add_argument  # `dest` is a field of LineupOptions
    add("--encoder", dest="encoders", action="append", default=[], metavar="FOLDER",
        help="repeatable (default: the bundled encoder)")  # fmt: skip
    add("--pair", dest="pairs", action="append", default=[], nargs=2, metavar=("QUERY", "DOCUMENT"),
        help="a query encoder and a document encoder of one space, repeatable")  # fmt: skip
    add("--service", dest="services", action="append", default=[], metavar="URL", help="a running service, repeatable")
    add("--bm25", action=BooleanOptionalAction, default=True, help="BM25 beside the others")
    add("--hybrid", action=BooleanOptionalAction, default=True, help="each encoder and pair fused with BM25")
    add("--fusion", dest="fusions", type=Fusion, choices=list(Fusion), nargs="+", default=[Fusion.SCORES],
        help="how hybrids are fused (scores)")  # fmt: skip
    add("--weight", dest="weights", type=share, nargs="+", default=[], metavar="SHARE",
        help="shares of the dense side to try in score fusion (default: chosen by query)")  # fmt: skip
    add("--reranker", dest="rerankers", action="append", default=[], metavar="FOLDER",
        help="each encoder, pair and hybrid with its first documents reranked, repeatable")  # fmt: skip
    add("--rerank-depth", type=positive, default=20, metavar="N", help="how many of them (%(default)s)")
    add("--fresh", action="store_true", help="pairs with documents as the service reads fresh ones, too")
    add("--dims", type=positive, nargs="+", default=[], metavar="DIM", help="judge the first dimensions alone, too")
    add("--hyde", nargs=2, metavar=("URL", "MODEL"),
        help="HyDE with each encoder, by an OpenAI-compatible endpoint (http://…/v1)")  # fmt: skip
    add("--hyde-documents", type=positive, default=1, metavar="N",
        help="documents that it writes for a query (%(default)s)")  # fmt: skip
    add("--hyde-fusing", choices=("mean", "document", "joined"), nargs="+", default=("mean",),
        help="mean of the vectors of query and documents, documents alone, or both as one text (mean)")  # fmt: skip
    add("--hyde-seeds", type=positive, default=1, metavar="N",
        help="repeat it with other documents, and show the mean (%(default)s)")  # fmt: skip
    add("--hyde-at-once", type=positive, default=8, metavar="N", help="requests to it at once (%(default)s)")
    add = parser.add_argument_group("what comes out").add_argument
    add("--baseline", metavar="SYSTEM", help="mark what differs from this system beyond chance")
    add("--speed", action="store_true", help="measure queries per second, one query at a time")
    add("--save", type=Path, metavar="RUN.json.gz", help="keep every query's result for care eval diff")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add("--html", type=Path, metavar="FOLDER", help="write a page with figures (measures speed, too)")
    add("--cache", type=Path, default=CACHE, help="where embeddings are kept (%(default)s)")
    add("--no-cache", action="store_true", help="keep nothing and use nothing that was kept")


def run(arguments: Namespace) -> None:
    if arguments.list:
        print(loader.listing(arguments.data))
        return
    draws = arguments.html is not None
    check_libraries("httpx", *["matplotlib"] * draws)
    _check_outputs(arguments)
    began = time.monotonic()
    tasks, missing = _tasks(arguments)
    options = LineupOptions(**{field.name: getattr(arguments, field.name) for field in fields(LineupOptions)})
    if not (options.encoders or options.pairs or options.services):
        options = replace(options, encoders=[ENCODER])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if arguments.no_cache else arguments.cache
        lineup = Lineup(options, folder, stack, lambda count: bar.update(count))
        systems = [system.facts for system in lineup.systems]
        systems += mean_systems(systems)
        names = [facts.name for facts in systems]
        if arguments.baseline is not None and arguments.baseline not in names:
            raise CareError(f"--baseline {arguments.baseline}: not one of {', '.join(names)}")
        unread = lineup.outstanding(tasks)
        bar = stack.enter_context(Progress("encode", "characters", unread) if unread else Progress("judge"))

        def report(of_set: Sequence[SetResult]) -> None:
            figures = ", ".join(f"{result.system} {result.value:.2f}" for result in of_set)
            bar.write(f"{of_set[0].set_name} {of_set[0].main_metric}: {figures}" if of_set else "")

        judgement = judge(tasks, lineup.systems, report, speed=arguments.speed or draws)
        curves = list(_curves(tasks, lineup)) if draws else []
    found = Run(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["care", *sys.argv[1:]]),
        machine=_machine(),
        seconds=time.monotonic() - began,
        systems=systems,
        results=judgement.results,
        curves=curves,
        missing=missing,
    )
    _publish(found, judgement, arguments)


def _publish(found: Run, judgement: Judgement, arguments: Namespace) -> None:
    marks = significance.compare(found, arguments.baseline) if arguments.baseline else {}
    print(tables.text(found, marks))
    for system, reasons in judgement.not_applicable.items():
        for reason, names in reasons.items():
            print(f"\n{system} has no figure for {', '.join(names)}: {reason}.")
    # After the table, which a full disk must not cost.
    if arguments.save is not None:
        found.save(arguments.save)
    if arguments.json is not None:
        rows = []
        for result in found.results:
            row = {**asdict(replace(result, queries=[])), "value": result.value}
            del row["queries"]
            mark = marks.get((result.benchmark, (result.set_name,), result.system))
            rows.append(row | ({"mark": asdict(mark)} if mark else {}))
        arguments.json.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if arguments.html is not None:
        page.write(found, arguments.html, marks)
    print(f"\n{found.seconds:.0f} s", file=sys.stderr)


def _tasks(arguments: Namespace) -> tuple[list[Task], dict[str, str]]:
    """Returns every set that was asked for, read and checked, and those that are not there with how to get them."""
    if not arguments.sets:
        raise CareError("name a folder with evaluation sets, or a benchmark (care eval --list shows them)")
    tasks: list[Task] = []
    missing: dict[str, str] = {}
    for name in arguments.sets:
        if Path(name).is_dir():
            if arguments.instructions:
                raise CareError(f"--instructions: {name} is a folder; a benchmark has them (care eval --list)")
            tasks += find_tasks(Path(name))
        elif name in benchmarks.names():
            found, lacking = loader.load(name, arguments.data, instructions=arguments.instructions)
            tasks += found
            missing |= lacking
        else:
            raise BadData(f"{name} is neither a folder nor a benchmark ({', '.join(benchmarks.names())})")
    if not tasks:
        raise BadData("none of the sets is here: " + "; ".join(f"{name}: {how}" for name, how in missing.items()))
    counts = Counter((task.benchmark, task.name) for task in tasks)
    twice = next((" ".join(key) for key, count in counts.items() if count > 1), None)
    if twice is not None:
        raise BadData(f"two sets are called {twice}: judge each once, and in folders of different names")
    return tasks, missing


def _curves(tasks: Sequence[Task], lineup: Lineup) -> Iterator[Curve]:
    """Yields what the page draws beside the results. Indexes are built once for a corpus: that is what takes time."""
    for dense in lineup.dense:
        name, indexed = dense.facts.name, None
        for task in tasks:
            if not isinstance(task.data, RetrievalSet):
                continue
            embeddings = dense.embeddings(task, task.data)
            yield studies.dimension_sweep(task.data, name, *embeddings)
            yield from studies.similarities(task.data, name, *embeddings)
            if indexed is not task.data.documents:
                yield from studies.index_speed(task.data, name, *embeddings)
            indexed = task.data.documents


def _check_outputs(arguments: Namespace) -> None:
    """Refuses an output path that cannot be written, before hours of work."""
    given = {option: path for option in ("save", "json", "html") if (path := getattr(arguments, option)) is not None}
    for option, path in given.items():
        first = next(other for other, place in given.items() if place.resolve() == path.resolve())
        if first != option:
            raise CareError(f"--{option} {path}: --{first} would be overwritten; name another file")
        if not path.parent.is_dir():
            raise CareError(f"--{option} {path}: there is no folder {path.parent}")
        if path.exists() and path.is_dir() != (option == "html"):
            raise CareError(f"--{option} {path}: name a {'folder' if option == 'html' else 'file'}, which this is not")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise CareError(f"--{option} {path}: cannot be written; choose another place or change its permissions")


def _machine() -> str:
    """Returns the processor in words, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()}, {os.cpu_count()} cores" + (f", {model}" if model else "")

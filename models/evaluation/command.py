"""Judge encoders, pairs of them, BM25, hybrids or a running service on evaluation sets, and print the papers' table.

care eval examples
care eval DATA --encoder models/pretrained/care-small-zh --encoder CHECKPOINT,pooling=mean --no-hybrid
care eval cmirb bmretriever --data DATA --pair QUERY_ENCODER DOCUMENT_ENCODER --baseline BM25 --save run.json.gz
care eval DATA --fusion scores reciprocal --weight 0.3 0.5 0.7
care eval DATA/cmirb/cslrel --service http://127.0.0.1:8000
care eval diff A.json.gz B.json.gz

An encoder is a folder, with `,name=value` behind it where the folder does not say how it is used: pooling=cls|eos|mean
and max_length for a transformers checkpoint, variant=fp32|fp16|int8 for ONNX graphs, dtype=float32|bfloat16|float16 for
torch, precision=bf16|fp32|fp8 for a Qwen2 or Qwen3 as the indexer reads it, device=cpu|cuda. A service may be given
,mode=dense|lexical|hybrid.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from models.encoder.spec import Side
from models.errors import BadData, BadEncoder, CareError
from models.evaluation import significance, studies
from models.evaluation.benchmarks import loader
from models.evaluation.benchmarks import names as benchmark_names
from models.evaluation.cache import VectorCache
from models.evaluation.encoders import (
    Address,
    CutReader,
    EncoderReader,
    OpenEncoder,
    PairReader,
    Reader,
    open_encoder,
    size,
)
from models.evaluation.judge import Judgement, judge
from models.evaluation.remote import Endpoint
from models.evaluation.report import page, tables
from models.evaluation.results import Curve, Run, SetResult
from models.evaluation.sets import RetrievalSet, Task, find_tasks
from models.evaluation.systems import Dense, Hybrid, Lexical, System, fresh_systems
from models.fusion import Fusion
from models.package import BUNDLED_ENCODER, positive, share

ENCODER = str(BUNDLED_ENCODER)
CACHE = Path("var/embeddings")
NEEDED = ("ranx", "scipy", "httpx")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sets", nargs="*", help="folders with evaluation sets, or names of benchmarks (--list)")
    parser.add_argument("--data", type=Path, help="folder in which benchmarks look for their sets first")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and their sets, and stop")
    parser.add_argument("--instructions", action="store_true", help="ask as the benchmark instructs, not the encoder")
    systems = parser.add_argument_group("systems")
    systems.add_argument(
        "--encoder", action="append", metavar="FOLDER", help="repeatable (default: the bundled encoder)"
    )
    systems.add_argument("--pair", action="append", nargs=2, metavar=("QUERY", "DOCUMENT"),
                         help="a query encoder and a document encoder of one space, repeatable")  # fmt: skip
    systems.add_argument("--service", action="append", default=[], metavar="URL", help="a running service, repeatable")
    systems.add_argument("--bm25", action=BooleanOptionalAction, default=True, help="BM25 beside the others")
    systems.add_argument("--hybrid", action=BooleanOptionalAction, default=True,
                         help="each encoder and pair fused with BM25")  # fmt: skip
    systems.add_argument("--fusion", type=Fusion, choices=list(Fusion), nargs="+", default=[Fusion.SCORES],
                         help="how hybrids are fused (scores)")  # fmt: skip
    systems.add_argument("--weight", type=share, nargs="+", default=[], metavar="SHARE",
                         help="shares of the dense side to try in score fusion (default: chosen by query)")  # fmt: skip
    systems.add_argument("--fresh", action="store_true",
                         help="pairs with documents as the service reads fresh ones, too")  # fmt: skip
    systems.add_argument("--dims", type=positive, nargs="+", default=[], metavar="DIM",
                         help="judge the first dimensions alone, too")  # fmt: skip
    systems.add_argument("--hyde", nargs=2, metavar=("URL", "MODEL"),
                         help="HyDE with each encoder, by an OpenAI-compatible endpoint (http://…/v1)")  # fmt: skip
    systems.add_argument("--hyde-documents", type=positive, default=1, metavar="N",
                         help="documents that it writes for a query (%(default)s)")  # fmt: skip
    output = parser.add_argument_group("what comes out")
    output.add_argument("--baseline", metavar="SYSTEM", help="mark what differs from this system beyond chance")
    output.add_argument("--speed", action="store_true", help="measure queries per second, one query at a time")
    output.add_argument("--save", type=Path, metavar="RUN.json.gz", help="keep every query's result for care eval diff")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    output.add_argument("--html", type=Path, metavar="FOLDER", help="write a page with figures (measures speed, too)")
    output.add_argument("--cache", type=Path, default=CACHE, help="where embeddings are kept (%(default)s)")
    output.add_argument("--no-cache", action="store_true", help="keep nothing and use nothing that was kept")


def run(arguments: Namespace) -> None:
    if arguments.list:
        print(loader.listing(arguments.data))
        return
    _require_libraries([*NEEDED, "matplotlib"] if arguments.html is not None else NEEDED)
    _check_outputs(arguments)
    began = time.monotonic()
    tasks, missing = _tasks(arguments)
    with ExitStack() as stack, tqdm(unit=" characters", unit_scale=True, leave=False, disable=None) as bar:
        folder = Path(stack.enter_context(TemporaryDirectory())) if arguments.no_cache else arguments.cache
        lineup = Lineup(_wanted(arguments), folder, stack, bar.update)
        names = [system.facts.name for system in lineup.systems]
        if arguments.baseline is not None and arguments.baseline not in names:
            raise CareError(f"--baseline {arguments.baseline}: not one of {', '.join(names)}")
        bar.reset(total=lineup.outstanding(tasks))
        speed = arguments.speed or arguments.html is not None
        judgement = judge(tasks, lineup.systems, lambda of_set: bar.write(_line(of_set), sys.stderr), speed=speed)
        curves = list(_curves(tasks, lineup)) if arguments.html is not None else []
    found = Run(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["care", *sys.argv[1:]]),
        machine=_machine(),
        seconds=time.monotonic() - began,
        systems=[system.facts for system in lineup.systems],
        results=judgement.results,
        curves=curves,
        missing=missing,
    )
    _publish(found, judgement, arguments)


def _publish(found: Run, judgement: Judgement, arguments: Namespace) -> None:
    if arguments.save is not None:
        found.save(arguments.save)
    marks = significance.compare(found, arguments.baseline) if arguments.baseline else {}
    print(tables.text(found, marks))
    for system, reasons in judgement.not_applicable.items():
        for reason, names in reasons.items():
            print(f"\n{system} has no figure for {', '.join(names)}: {reason}.")
    if arguments.json is not None:
        rows = [_row(result, marks) for result in found.results]
        arguments.json.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if arguments.html is not None:
        page.write(found, arguments.html, marks)
    print(f"\n{found.seconds:.0f} s", file=sys.stderr)


def _tasks(arguments: Namespace) -> tuple[list[Task], dict[str, str]]:
    """Every set that was asked for, read and checked, and those that are not there with how to get them."""
    if not arguments.sets:
        raise CareError("name a folder with evaluation sets, or a benchmark (care eval --list shows them)")
    tasks: list[Task] = []
    missing: dict[str, str] = {}
    for name in arguments.sets:
        if Path(name).is_dir():
            tasks += find_tasks(Path(name))
        elif name in benchmark_names():
            found, lacking = loader.load(name, arguments.data, instructions=arguments.instructions)
            tasks += found
            missing |= lacking
        else:
            raise BadData(f"{name} is neither a folder nor a benchmark ({', '.join(benchmark_names())})")
    if not tasks:
        raise BadData("none of the sets is here: " + "; ".join(f"{name}: {how}" for name, how in missing.items()))
    counts = Counter((task.benchmark, task.name) for task in tasks)
    twice = next((" ".join(key) for key, count in counts.items() if count > 1), None)
    if twice is not None:
        raise BadData(f"two sets are called {twice}: judge each once, and in folders of different names")
    return tasks, missing


def _wanted(arguments: Namespace) -> Wanted:
    encoders = arguments.encoder or []
    if not (encoders or arguments.pair or arguments.service):
        encoders = [ENCODER]
    return Wanted(
        encoders=encoders,
        pairs=[(query, document) for query, document in arguments.pair or []],
        services=arguments.service,
        bm25=arguments.bm25,
        hybrid=arguments.hybrid,
        fusions=list(dict.fromkeys(arguments.fusion)),
        weights=list(dict.fromkeys(arguments.weight)),
        dims=list(dict.fromkeys(arguments.dims)),
        fresh=arguments.fresh,
        hyde=tuple(arguments.hyde) if arguments.hyde else None,
        hyde_documents=arguments.hyde_documents,
    )


def _curves(tasks: Sequence[Task], lineup: Lineup) -> Iterator[Curve]:
    """What the page draws beside the results. Indexes are built once for a corpus: that is what takes time."""
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


def _require_libraries(names: Sequence[str]) -> None:
    lacking = [name for name in names if find_spec(name) is None]
    if lacking:
        raise CareError(f"needs {', '.join(lacking)}: pip install 'care-search[eval]' (make eval has them)")


def _check_outputs(arguments: Namespace) -> None:
    """Refuses, before hours of work, a place where nothing can be written."""
    for option in ("save", "json", "html"):
        path: Path | None = getattr(arguments, option)
        if path is None:
            continue
        if not path.parent.is_dir():
            raise CareError(f"--{option} {path}: there is no folder {path.parent}")
        if path.exists() and path.is_dir() != (option == "html"):
            raise CareError(f"--{option} {path}: name a {'folder' if option == 'html' else 'file'}, which this is not")


def _line(of_set: Sequence[SetResult]) -> str:
    """What is said of a set when it is through."""
    if not of_set:
        return ""
    figures = ", ".join(f"{result.system} {result.value:.2f}" for result in of_set)
    return f"{of_set[0].set_name} {of_set[0].main_metric}: {figures}"


def _row(result: SetResult, marks: significance.Marks) -> dict[str, object]:
    row = {**asdict(replace(result, queries=[])), "value": result.value}
    mark = marks.get((result.benchmark, (result.set_name,), result.system))
    return {key: value for key, value in row.items() if key != "queries"} | ({"mark": asdict(mark)} if mark else {})


def _machine() -> str:
    """The processor in words, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()}, {os.cpu_count()} cores" + (f", {model}" if model else "")


VECTORS, RANKINGS, DOCUMENTS = "vectors", "bm25", "hyde"
"""Folders of the cache."""
MODE = "mode"
MODES = ("dense", "lexical", "hybrid")
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which systems to judge. Encoders and services are addresses: PLACE,name=value,…"""

    encoders: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    services: Sequence[str] = ()
    bm25: bool = True
    hybrid: bool = True
    fusions: Sequence[Fusion] = (Fusion.SCORES,)
    weights: Sequence[float] = ()
    """The dense side's shares to try in score fusion; none: chosen by query."""
    dims: Sequence[int] = ()
    """Judge the encoders' first so many dimensions too."""
    fresh: bool = False
    """Judge pairs as they read fresh documents, too."""
    hyde: tuple[str, str] | None = None
    """Address of an endpoint, and its model."""
    hyde_documents: int = 1


class Lineup:
    """The systems, in the order of the table; `dense` are those of whole encoders and pairs.

    Connections are closed with `stack`; `advance` is told how many characters were encoded.
    """

    def __init__(self, wanted: Wanted, cache: Path, stack: ExitStack, advance: Callable[[int], object]) -> None:
        self._cache, self._stack, self._advance = cache, stack, advance
        self._encoders: dict[str, OpenEncoder] = {}
        self._vectors: dict[str, VectorCache] = {}
        self._sides: list[tuple[EncoderReader, tuple[Side, ...]]] = []
        _check(wanted)
        self.dense = [Dense(reader) for reader in self._readers(wanted)]
        self.systems: list[System] = list(self._systems(wanted))
        counts = Counter(system.facts.name for system in self.systems)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise CareError(
                f"two systems are called {twice!r}; give each once, folders different names, "
                "and a second service a run of its own (care eval diff)"
            )
        if not self.systems:
            raise CareError("no system to judge; give --encoder, --pair or --service")

    def outstanding(self, tasks: Sequence[Task]) -> int:
        """How many characters the encoders have yet to read."""
        unread = {
            (reader.encoder.fingerprint, text) for reader, sides in self._sides for text in reader.unread(tasks, sides)
        }
        return sum(size(text) for _, text in unread)

    def _readers(self, wanted: Wanted) -> Iterator[Reader]:
        for address in wanted.encoders:
            yield self._reader(address, tuple(Side))
        for query, document in wanted.pairs:
            yield PairReader(self._reader(query, (Side.QUERY,)), self._reader(document, (Side.DOCUMENT,)))

    def _reader(self, address: str, sides: tuple[Side, ...]) -> EncoderReader:
        if address not in self._encoders:
            self._encoders[address] = open_encoder(address)
        encoder = self._encoders[address]
        for side in sides:
            if side not in encoder.spec.sides:
                raise BadEncoder(f"{encoder.name} is not made to read a {side}; give it as half of a --pair")
        if encoder.fingerprint not in self._vectors:
            folder = self._cache / VECTORS / encoder.fingerprint
            self._vectors[encoder.fingerprint] = VectorCache(folder, encoder.spec.dim)
        reader = EncoderReader(encoder, self._vectors[encoder.fingerprint], self._advance)
        self._sides.append((reader, sides))
        return reader

    def _systems(self, wanted: Wanted) -> Iterator[System]:
        lexical = Lexical(self._cache / RANKINGS)
        if wanted.bm25:
            yield lexical
        yield from self.dense
        for dense in self.dense:
            yield from (Dense(_cut(dense.reader, dim)) for dim in wanted.dims)
        if wanted.hyde is not None:
            yield from self._hyde(wanted.hyde, wanted.hyde_documents)
        if wanted.fresh:
            for dense in self.dense:
                yield from fresh_systems(dense)
        if wanted.hybrid:
            for dense in self.dense:
                yield from (Hybrid(dense, lexical, *how) for how in _fusions(wanted))
        yield from map(self._service, wanted.services)

    def _hyde(self, address: tuple[str, str], documents: int) -> Iterator[System]:
        # Only who asks for them needs httpx.
        from models.evaluation.remote import Generator, HydeReader

        key = os.environ.get(KEY)
        endpoint = self._endpoint(address[0], {"authorization": f"Bearer {key}"} if key else {})
        generator = Generator(endpoint, address[1], documents, self._cache / DOCUMENTS)
        yield from (Dense(HydeReader(dense.reader, generator)) for dense in self.dense)

    def _service(self, text: str) -> System:
        from models.evaluation.remote import Service

        address = Address.parse(text, (MODE,))
        mode = address.options.get(MODE)
        if mode is not None and mode not in MODES:
            raise CareError(f"{MODE}={mode}: choose from {', '.join(MODES)}")
        return Service(self._endpoint(address.place, {}), mode)

    def _endpoint(self, base: str, headers: dict[str, str]) -> Endpoint:
        from models.evaluation.remote import Endpoint

        endpoint = Endpoint(base, headers)
        self._stack.callback(endpoint.close)
        return endpoint


def _check(wanted: Wanted) -> None:
    """Refuses what would be asked for in vain."""
    if wanted.fresh and not wanted.pairs:
        raise CareError("--fresh: only a --pair has another encoder for fresh documents; give one")
    if wanted.weights and not (wanted.hybrid and Fusion.SCORES in wanted.fusions):
        raise CareError("--weight: only hybrids by --fusion scores have one; leave it out")


def _cut(reader: Reader, dim: int) -> CutReader:
    if reader.facts.dim is None or not 0 < dim <= reader.facts.dim:
        raise CareError(f"--dims {dim}: {reader.facts.name} has {reader.facts.dim}")
    return CutReader(reader, dim)


def _fusions(wanted: Wanted) -> Iterable[tuple[Fusion, float | None]]:
    for fusion in wanted.fusions:
        weights = wanted.weights if fusion is Fusion.SCORES else ()
        yield from ((fusion, weight) for weight in weights or (None,))

"""From a benchmark's name to tasks: sets of a folder are found and checked, missing ones are named."""

import gzip
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from socket import socket

import pytest
from huggingface_hub import constants as hub

from models.errors import BadData, CareError
from models.evaluation import benchmarks as spec
from models.evaluation.benchmarks import loader as libraries
from models.evaluation.benchmarks.loader import listing, load
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet
from tests.support.http_thread import QuietHandler, serving_http

BENCHMARK = """
title = "Ours"
about = "One set of each kind"
source = "none"
licence = "CC0"

[[sets]]
name = "colds"
kind = "retrieval"
metric = "Recall@100"
counts = {queries = 1, documents = 2}
query_instruction = "Find it."
obtain = "write it"

[[sets]]
name = "drugs"
kind = "linking"
metric = "MRR@5"
counts = {queries = 1, documents = 2}
obtain = "write it"

[[sets]]
name = "lists"
kind = "rerank"
metric = "MAP@10"
relevant = 1
counts = {queries = 1}
obtain = "write it"

[[sets]]
name = "pairs"
kind = "sts"
metric = "Spearman"
counts = {queries = 2}
obtain = "write it"
"""


@pytest.fixture(autouse=True)
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a folder of benchmark files with one file, which a test may rewrite."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "ours.toml").write_text(BENCHMARK, encoding="utf-8")
    monkeypatch.setattr(spec, "FOLDER", folder)
    return folder / "ours.toml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_retrieval(folder: Path, qrels: str = "qrels.tsv") -> None:
    write_rows(folder / "corpus.jsonl", [{"_id": "d1", "text": "感冒"}, {"_id": "d2", "text": "发烧"}])
    write_rows(folder / "queries.jsonl", [{"_id": "q1", "text": "着凉"}])
    (folder / qrels).parent.mkdir(exist_ok=True)
    (folder / qrels).write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")


def write_all(data: Path) -> None:
    write_retrieval(data / "colds")
    write_retrieval(data / "linking" / "drugs")
    candidates = [{"text": "感冒", "grade": 2}, {"text": "发烧", "grade": 1}, {"text": "骨折", "grade": 0}]
    write_rows(data / "rerank" / "lists.jsonl", [{"query": "着凉", "candidates": candidates}])
    write_rows(
        data / "sts" / "pairs.jsonl", [{"a": "着凉", "b": "感冒", "score": 1}, {"a": "着凉", "b": "骨折", "score": 0}]
    )


def test_a_set_of_each_kind_is_loaded_from_a_folder(data: Path) -> None:
    write_all(data)
    tasks, missing = load("ours", data)
    assert missing == {}
    assert [(task.benchmark, task.name, task.kind, task.main_metric) for task in tasks] == [
        ("ours", "colds", Kind.RETRIEVAL, "Recall@100"),
        ("ours", "drugs", Kind.LINKING, "MRR@5"),
        ("ours", "lists", Kind.RERANK, "MAP@10"),
        ("ours", "pairs", Kind.STS, "Spearman"),
    ]
    retrieval, _, rerank, pairs = (task.data for task in tasks)
    assert isinstance(retrieval, RetrievalSet)
    assert retrieval.qrels == {"q1": {"d1": 1}}
    assert isinstance(rerank, RerankSet)
    assert rerank.relevant == 1  # set by the benchmark, whatever the grades are
    assert isinstance(pairs, PairSet)
    assert pairs.scores == [1.0, 0.0]


def test_a_folder_named_after_the_benchmark_may_hold_its_sets_and_their_corpus(data: Path) -> None:
    write_retrieval(data / "ours" / "colds")
    with gzip.open(data / "ours" / "corpus.jsonl.gz", "wb") as file:
        file.write((data / "ours" / "colds" / "corpus.jsonl").read_bytes())
    (data / "ours" / "colds" / "corpus.jsonl").unlink()
    tasks, missing = load("ours", data)
    assert [task.name for task in tasks] == ["colds"]
    assert list(missing) == ["drugs", "lists", "pairs"]


def test_the_split_chooses_among_qrels_in_the_layout_of_beir(data: Path, ours: Path) -> None:
    ours.write_text(BENCHMARK.replace('metric = "Recall@100"', 'metric = "Recall@100"\nsplit = "dev"'))
    write_retrieval(data / "colds", qrels="qrels/dev.tsv")
    assert [task.name for task in load("ours", data)[0]] == ["colds"]


def test_a_set_may_be_at_the_path_that_the_benchmark_gives(data: Path, ours: Path) -> None:
    ours.write_text(BENCHMARK.replace('name = "colds"', 'name = "colds"\npath = "pool/winter"'))
    write_retrieval(data / "pool" / "winter")
    tasks, _ = load("ours", data)
    assert [task.name for task in tasks] == ["colds"]


def test_instructions_are_included_only_on_request(data: Path) -> None:
    write_all(data)
    assert [task.query_instruction for task in load("ours", data)[0]] == [None] * 4
    tasks, _ = load("ours", data, instructions=True)
    assert [(task.query_instruction, task.document_instruction) for task in tasks[:2]] == [
        ("Find it.", None),
        (None, None),
    ]


def test_a_task_has_the_prompt_that_its_set_names(data: Path, ours: Path) -> None:
    prompts = '[prompts]\ntitle = "Write what stands under {query}"\n\n[[sets]]\nhyde = "title"'
    ours.write_text(BENCHMARK.replace("[[sets]]", prompts, 1))
    write_all(data)
    assert [task.hyde_prompt for task in load("ours", data)[0]] == ["Write what stands under {query}", None, None, None]


def test_every_missing_set_is_named_with_where_to_put_it(data: Path) -> None:
    tasks, missing = load("ours", data)
    assert tasks == []
    assert missing == {
        "colds": f"put queries.jsonl, corpus.jsonl and qrels.tsv in {data}/colds (write it)",
        "drugs": f"put queries.jsonl, corpus.jsonl and qrels.tsv in {data}/drugs (write it)",
        "lists": f"put lines {{query, candidates: [{{text, grade}}]}} in {data}/rerank/lists.jsonl (write it)",
        "pairs": f"put lines {{a, b, score}} in {data}/sts/pairs.jsonl (write it)",
    }
    assert "in DATA/colds" in load("ours", None)[1]["colds"]


def test_a_set_of_another_size_is_refused_and_the_others_are_loaded(data: Path) -> None:
    write_all(data)
    write_rows(data / "colds" / "corpus.jsonl", [{"_id": "d1", "text": "感冒"}])
    tasks, missing = load("ours", data)
    assert [task.name for task in tasks] == ["drugs", "lists", "pairs"]
    assert missing["colds"].startswith(
        f"{data}/colds is another set: it has 1 documents where the benchmark has 2; put queries.jsonl"
    )


@pytest.mark.usefixtures("with_mteb")
def test_the_error_for_a_wrong_size_names_the_library_with_the_right_set(data: Path) -> None:
    write_all(data)
    write_rows(data / "colds" / "corpus.jsonl", [{"_id": "d1", "text": "感冒"}])
    assert "; leave it out for mteb task SciFact, or put queries.jsonl" in load("ours", data)[1]["colds"]


def test_a_broken_file_gives_an_error_with_the_line(data: Path) -> None:
    write_all(data)
    (data / "sts" / "pairs.jsonl").write_text('{"a": "着凉", "b": "感冒", "score": 1}\n{"a": \n')
    with pytest.raises(BadData, match=r"pairs\.jsonl:2: not JSON"):
        load("ours", data)


def test_a_missing_data_folder_is_an_error(data: Path) -> None:
    with pytest.raises(CareError, match="nowhere: no such folder"):
        load("ours", data / "nowhere")


class _Forbidden(QuietHandler):
    """A hub that can be reached, but answers with an error."""

    def do_HEAD(self) -> None:
        self.answer(403)


def use_as_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    """Makes a port of this machine the hub; returns its address."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{port}")
    return hub.ENDPOINT


@pytest.fixture
def answering_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serving_http(_Forbidden) as port:
        use_as_hub(monkeypatch, port)
        yield


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address without a listener: the port is taken and connections to it are refused."""
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield use_as_hub(monkeypatch, taken.getsockname()[1])


@pytest.fixture
def with_mteb(ours: Path) -> None:
    ours.write_text(BENCHMARK.replace('obtain = "write it"', 'mteb = "SciFact"'))


@pytest.mark.usefixtures("with_mteb")
def test_an_unreachable_hub_is_reported_for_each_set_and_contacted_once(
    silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    probe = libraries.unreachable
    monkeypatch.setattr(libraries, "unreachable", lambda: asked.append(1) or probe())
    tasks, missing = load("ours", None)
    assert tasks == []
    assert len(asked) == 1
    assert missing["pairs"].startswith(f"mteb task SciFact: {silent_hub} cannot be reached (")
    assert "HF_HUB_OFFLINE=1" in missing["pairs"]
    assert missing["pairs"].endswith("; or put lines {a, b, score} in DATA/sts/pairs.jsonl")


@pytest.mark.usefixtures("with_mteb", "silent_hub")
def test_sets_in_a_folder_need_no_hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(data)
    monkeypatch.setattr(libraries, "unreachable", lambda: pytest.fail("the hub was contacted"))
    assert load("ours", data)[1] == {}


@pytest.mark.usefixtures("with_mteb", "answering_hub")
def test_without_the_package_the_error_names_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.unreachable() is None
    monkeypatch.setitem(sys.modules, "mteb", None)
    _, missing = load("ours", None)
    assert missing["colds"].startswith("mteb is not installed; pip install mteb; or put queries.jsonl")


@pytest.mark.usefixtures("answering_hub")
def test_without_datasets_a_hub_set_names_the_command_to_install_it(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.write_text(BENCHMARK.replace('obtain = "write it"', 'hub = "someone/something"'))
    monkeypatch.setitem(sys.modules, "datasets", None)
    _, missing = load("ours", None)
    assert missing["colds"].startswith("datasets is not installed; pip install mteb; or put queries.jsonl")


def test_the_listing_shows_the_source_of_each_set_or_its_error(data: Path, ours: Path) -> None:
    ours.write_text('note = "Mind the pool."\n' + BENCHMARK.replace('obtain = "write it"', 'mteb = "SciFact"', 1))
    write_all(data)
    for name in ("colds", "linking"):
        shutil.rmtree(data / name)
    write_rows(data / "rerank" / "lists.jsonl", [{"query": "着凉", "candidates": [{"text": "感冒", "grade": 1}]}] * 2)
    rows = listing(data).splitlines()[2:]
    assert rows[0] == "| ours | colds | retrieval | Recall@100 | 1 | 2 | mteb task SciFact |"
    assert rows[1] == "| ours | drugs | linking | MRR@5 | 1 | 2 | not here: a folder must bring it |"
    assert rows[2].startswith(f"| ours | lists | rerank | MAP@10 | 1 |  | {data}/rerank/lists.jsonl is another set: ")
    assert rows[3] == f"| ours | pairs | sts | Spearman | 2 |  | {data}/sts/pairs.jsonl |"
    assert rows[4:] == ["", "ours: Mind the pool."]

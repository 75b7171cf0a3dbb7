"""`care eval` as a person uses it: from sets to a table, figures, a saved run and a page."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli
from models.evaluation import command, judge, studies
from models.evaluation.results import Run
from tests.e2e.server import Server
from tests.support.evaluation import write_lines
from tests.support.json_server import json_server

DRUGS = {
    "d1": "缬沙坦是治疗高血压的药物，每天早上服用一次。",
    "d2": "布洛芬可以退烧止痛，儿童按体重用药。",
    "d3": "二甲双胍是治疗二型糖尿病的首选药物。",
    "d4": "感冒多由病毒引起，多喝水，注意休息。",
    "d5": "胃溃疡患者应当避免辛辣食物和酒精。",
}
QUESTIONS = {"q1": ("高血压吃什么药", "d1"), "q2": ("孩子发烧怎么办", "d2"), "q3": ("血糖高怎么治", "d3")}
HEAVY = ("ranx", "numba", "scipy", "matplotlib", "httpx", "mteb", "torch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A retrieval set of five documents, a list of candidates and three pairs."""
    root = tmp_path_factory.mktemp("eval") / "data"
    folder = root / "drugs"
    write_lines(folder / "corpus.jsonl", [{"_id": id, "text": text} for id, text in DRUGS.items()])
    write_lines(folder / "queries.jsonl", [{"_id": id, "text": text} for id, (text, _) in QUESTIONS.items()])
    lines = [f"{id}\t{document}\t1" for id, (_, document) in QUESTIONS.items()]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n", encoding="utf-8")
    candidates = [{"text": DRUGS["d5"], "grade": 0}, {"text": DRUGS["d1"], "grade": 2}]
    write_lines(root / "rerank" / "lists.jsonl", [{"query": "高血压吃什么药", "candidates": candidates}])
    pairs = [("高血压", "血压高", 1.0), ("高血压", "糖尿病", 0.3), ("感冒", "胃溃疡", 0.0)]
    write_lines(root / "sts" / "pairs.jsonl", [{"a": a, "b": b, "score": score} for a, b, score in pairs])
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Returns the output of a call that succeeds."""
    code = cli.main(["eval", *map(str, arguments)])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Returns the one line of a call that fails."""
    try:
        code = cli.main(["eval", *map(str, arguments)])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    output = capsys.readouterr()
    assert code == 1
    (line,) = output.err.splitlines()
    assert line.startswith("care eval")
    return line


@pytest.mark.timeout(900)  # encodes the whole example corpus: seconds of work on a free machine
def test_search_on_the_example_corpus_reaches_the_quality_floor(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Checks the least quality of the bundled encoder, and that no text is encoded twice."""
    arguments = ("examples", "--cache", tmp_path / "cache")
    first = evaluate(capsys, *arguments, "--json", tmp_path / "figures.json")
    figures = {row["system"]: row["value"] for row in json.loads((tmp_path / "figures.json").read_text())}
    dense = figures["care-small-zh (int8)"]
    assert dense >= 75
    assert figures["hybrid care-small-zh (int8)"] >= max(dense, figures["BM25"]) - 2
    assert f"{dense:.2f}" in first
    kept = {path: path.stat().st_size for path in (tmp_path / "cache").rglob("*.*")}
    assert evaluate(capsys, *arguments) == first
    assert {path: path.stat().st_size for path in (tmp_path / "cache").rglob("*.*")} == kept


def test_without_a_terminal_progress_is_printed_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("models.progress.SAY_EVERY_SECONDS", 0.0)
    arguments = ["eval", str(data / "drugs"), "--cache", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert re.search(r"^encode, (\d+) of \1 characters: .* left$", capsys.readouterr().err, re.MULTILINE)
    assert cli.main(arguments) == 0
    assert "characters" not in capsys.readouterr().err


def test_every_kind_of_set_is_judged_and_gaps_are_explained(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path, tmp_path: Path
) -> None:
    output = evaluate(capsys, data, "--cache", cache, "--save", tmp_path / "run.json.gz", "--speed")
    run = Run.load(tmp_path / "run.json.gz")
    assert {(result.set_name, result.main_metric) for result in run.results} == {
        ("drugs", "nDCG@10"),
        ("lists", "MAP@10"),
        ("pairs", "Pearson"),
    }
    assert [facts.name for facts in run.systems] == ["BM25", "care-small-zh (int8)", "hybrid care-small-zh (int8)"]
    assert "BM25 has no figure for pairs: " in output
    assert all((result.queries_per_second is not None) == (result.set_name == "drugs") for result in run.results)
    pearson = next(result for result in run.results if result.set_name == "pairs")
    assert pearson.system == "care-small-zh (int8)"
    assert pearson.value > 50


def test_a_baseline_without_a_figure_does_not_remove_other_figures(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path
) -> None:
    output = evaluate(capsys, data / "sts", "--cache", cache, "--baseline", "BM25")
    assert "care-small-zh (int8)" in output.splitlines()[3]
    assert "BM25 has no figure for pairs: " in output


def test_fusions_weights_and_dimensions_are_compared_in_one_call(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path, tmp_path: Path
) -> None:
    json_file = tmp_path / "figures.json"
    evaluate(capsys, data / "drugs", "--cache", cache, "--fusion", "scores", "reciprocal", "--weight", "0.3", "0.7",
             "--dims", "64", "--no-bm25", "--json", json_file)  # fmt: skip
    assert [row["system"] for row in json.loads(json_file.read_text())] == [
        "care-small-zh (int8)",
        "care-small-zh (int8) 64d",
        "hybrid care-small-zh (int8) 0.3",
        "hybrid care-small-zh (int8) 0.7",
        "hybrid care-small-zh (int8) reciprocal",
    ]


def test_a_pair_of_the_same_encoder_scores_like_that_encoder(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path, tmp_path: Path
) -> None:
    encoder = command.ENCODER
    evaluate(capsys, data / "drugs", "--cache", cache, "--encoder", encoder, "--pair", encoder, encoder,
             "--no-bm25", "--no-hybrid", "--json", tmp_path / "figures.json")  # fmt: skip
    single, pair = json.loads((tmp_path / "figures.json").read_text())
    assert pair["system"] == "care-small-zh (int8) + care-small-zh (int8)"
    assert pair["metrics"] == single["metrics"]


def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str], data: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.json.gz"
    evaluate(capsys, data / "drugs", "--cache", cache, "--baseline", "BM25", "--save", run)
    output = evaluate(capsys, "diff", run, run, "--system", "BM25", "--system", "care-small-zh (int8)")
    assert "drugs · nDCG@10 · 3 queries" in output
    assert failure(capsys, "diff", run).startswith("care eval diff: the following arguments are required: B")
    assert failure(capsys, "diff", run, tmp_path / "none").startswith("care eval: ")


def test_a_page_with_figures_is_written(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "TIMED_SECONDS", 0.001)
    evaluate(capsys, data, "--cache", cache, "--html", tmp_path / "page", "--save", tmp_path / "run.json.gz")
    assert "care-small-zh (int8)" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    curves = Run.load(tmp_path / "run.json.gz").curves
    assert {curve.study for curve in curves} == {studies.DIMENSIONS, studies.INDEXES, studies.SIMILARITIES}
    assert {curve.set_name for curve in curves} == {"drugs"}


def test_without_the_cache_no_vectors_are_stored(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    evaluate(capsys, data / "drugs", "--no-cache", "--no-hybrid", "--cache", tmp_path / "unused")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def service(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service that holds the retrieval set's documents."""
    collection = tmp_path_factory.mktemp("service") / "collection"
    corpus = str(data / "drugs" / "corpus.jsonl")
    assert cli.main(["index", "build", corpus, "--collection", str(collection), "--publish", "--threads", "1"]) == 0
    server = Server(collection)
    server.start()
    yield server.url
    server.stop()


def test_a_running_service_scores_like_its_encoder(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path, service: str, tmp_path: Path
) -> None:
    output = evaluate(capsys, data, "--cache", cache, "--encoder", command.ENCODER, "--no-bm25", "--no-hybrid",
                      "--service", f"{service},mode=dense", "--save", tmp_path / "run.json.gz")  # fmt: skip
    results = {(r.set_name, r.system): r for r in Run.load(tmp_path / "run.json.gz").results}
    served = results["drugs", "service dense"]
    assert served.metrics["Recall@100"] == 100
    assert served.queries[0].hits[0].id == "d1"
    assert len(served.queries[0].hits) == len(DRUGS)
    assert results["lists", "service dense"].metrics == results["lists", "care-small-zh (int8)"].metrics
    assert "service dense has no figure for pairs: " in output


def test_a_service_with_other_documents_is_refused(
    capsys: pytest.CaptureFixture[str], cache: Path, service: str
) -> None:
    output = failure(capsys, "examples", "--cache", cache, "--service", service, "--no-bm25", "--no-hybrid")
    assert "serves 5 documents, examples has " in output
    assert output.endswith("build its collection from the set's corpus")


def test_hyde_finds_the_documents_that_the_model_writes(
    capsys: pytest.CaptureFixture[str], data: Path, cache: Path, tmp_path: Path
) -> None:
    with json_server(lambda path, body: (200, {"choices": [{"message": {"content": DRUGS["d5"]}}]})) as model:
        evaluate(capsys, data / "drugs", "--cache", cache, "--hyde", f"{model.url}/v1", "any", "--hyde-documents", "3",
                 "--no-bm25", "--no-hybrid", "--save", tmp_path / "run.json.gz")  # fmt: skip
    misled = Run.load(tmp_path / "run.json.gz").results[1]
    assert misled.system == "HyDE care-small-zh (int8) × 3"
    assert [query.hits[0].id for query in misled.queries] == ["d5"] * 3


def test_a_benchmark_names_missing_sets_and_how_to_get_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = failure(capsys, "cardioembed", "--data", tmp_path)
    assert "none of the sets is here: cardio-pairs: " in output
    assert "put " in output
    assert "cardio-pairs" in evaluate(capsys, "--list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a folder with evaluation sets, or a benchmark"),
        (("no-such-thing",), "no-such-thing is neither a folder nor a benchmark"),
        (("docs",), "docs: no evaluation set"),
        (("examples", "examples"), "two sets are called examples examples"),
        (("examples", "--weight", "7"), "'7' is not a number between 0 and 1"),
        (("examples", "--dims", "0"), "'0' is not a whole number above 0"),
        (("examples", "--json", "no-such-folder/figures.json"), "there is no folder no-such-folder"),
        (("examples", "--save", "no-such-folder/run.json.gz"), "there is no folder no-such-folder"),
        (("examples", "--save", "docs/run", "--json", "./docs/run"), "--json docs/run: --save would be overwritten"),
        (("examples", "--save", "docs"), "--save docs: name a file, which this is not"),
        (("examples", "--html", "README.md"), "--html README.md: name a folder, which this is not"),
        (("examples", "--instructions"), "--instructions: examples is a folder; a benchmark has them"),
        (("examples", "--fresh"), "--fresh: only a --pair"),
        (("examples", "--rerank-depth", "5"), "--rerank-depth has no effect without --reranker"),
        (("examples", "--hyde-fusing", "joined"), "--hyde-fusing has no effect without --hyde"),
        (("examples", "--weight", "0.5", "--fusion", "reciprocal"), "--weight: only hybrids by --fusion scores"),
        (("examples", "--encoder", "docs"), "docs holds neither encoder.json with an ONNX graph nor"),
        (("examples", "--baseline", "nobody"), "--baseline nobody: not one of BM25, care-small-zh (int8)"),
        (("examples", "--service", "127.0.0.1:1"), "not an address"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert message in failure(capsys, *arguments, "--cache", cache)


def test_a_missing_library_is_named_with_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "find_spec", lambda name: None)
    assert failure(capsys, "examples").endswith("pip install 'care-search[eval]' (make eval has them)")


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = f"import models.evaluation.command, sys; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"

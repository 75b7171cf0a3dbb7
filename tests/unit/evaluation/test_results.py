import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import BadData
from models.evaluation import results
from models.evaluation.results import Curve, Hit, Run
from tests.support.runs import make_run, pair_result, set_result


def a_run() -> Run:
    found = [set_result(system, [0.0, 0.5, 1.0]) for system in ("BM25", "dense")]
    for result in found:
        hits = [Hit("d1", "同一段文字", 1), Hit("d2", "同一段文字", 0)]
        result.queries[0] = replace(result.queries[0], hits=hits, gold=[Hit("d3", "答案", 2)])
    found.append(pair_result("dense", [0.1, 0.9], [0.0, 1.0], 100.0))
    return make_run(found, [Curve("study", "one", "dense", "line", "x", "y", [(1.0, 2.0)])], {"absent": "get it"})


def test_a_run_is_read_as_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    a_run().save(path)
    assert Run.load(path) == a_run()


def test_equal_runs_give_equal_files_with_each_text_stored_once(tmp_path: Path) -> None:
    a_run().save(tmp_path / "a.json.gz")
    a_run().save(tmp_path / "b.json.gz")
    content = (tmp_path / "a.json.gz").read_bytes()
    assert content == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(content).decode().count("同一段文字") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"no JSON"),
        gzip.compress(b"[]"),
        gzip.compress(b'{"format": 1}'),
        gzip.compress(b'{"format": 1, "texts": [], "results": [{"queries": [["q", 5, {}, [], []]]}]}'),
        gzip.compress(json.dumps({"format": 1, "texts": [], "results": []}).encode()),
        gzip.compress(b'{"format": 1}')[:-4],
        gzip.compress(b'{"format": 1}')[:12] + b"xxxxxxxxxxxxxxxxxxxx",
    ],
    # Named ids: gzip writes the time, and parallel test processes must agree on their names.
    ids=["empty", "no gzip", "no JSON", "a list", "no fields", "no such text", "fields missing", "cut off", "damaged"],
)
def test_a_file_that_is_not_a_run_gives_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json.gz").write_bytes(content)
    with pytest.raises(BadData, match=r"run\.json\.gz: not a run"):
        Run.load(tmp_path / "run.json.gz")


@pytest.mark.parametrize(("result", "lacking"), [(0, "nDCG@10"), (2, "gold score or similarity")])
def test_a_run_with_a_query_that_has_no_figure_is_refused(tmp_path: Path, result: int, lacking: str) -> None:
    path = tmp_path / "run.json.gz"
    a_run().save(path)
    values = json.loads(gzip.decompress(path.read_bytes()))
    values["results"][result]["queries"][0][2] = {"other": 1.0}
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(BadData, match=f"not a run that care eval wrote .*{lacking} is missing") as refused:
        Run.load(path)
    assert "\n" not in str(refused.value)


def test_a_run_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json.gz"
    monkeypatch.setattr(results, "FORMAT", 99)
    a_run().save(path)
    monkeypatch.undo()
    with pytest.raises(BadData, match="not a run of this version; run care eval again"):
        Run.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"none\.json\.gz"):
        Run.load(tmp_path / "none.json.gz")

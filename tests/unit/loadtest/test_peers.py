"""The comparison with peers: their inputs, requests to them, and the order of rounds."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadtest.harness import BenchError
from loadtest.harness.generator import Form, Job, Measurement
from loadtest.harness.servers import Server, run_command
from loadtest.lab import peers, peers_prepare
from loadtest.lab.peers import Contest, Contestant, ask, contestants
from loadtest.lab.peers_prepare import Prepared, prepare
from tests.unit.loadtest.tiny_server import answer, running

HITS = [{"id": f"d{number}", "score": 1.0} for number in range(10)]
IDS = [hit["id"] for hit in HITS]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "one").mkdir(parents=True)
    queries = [{"_id": "1", "text": "头痛"}, {"_id": "2", "text": "长" * 65}]
    (folder / "one" / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)), encoding="utf-8")
    with gzip.open(folder / "corpus.jsonl.gz", "wt", encoding="utf-8") as written:
        written.write(json.dumps({"_id": "a", "title": "题", "text": "长" * 900, "kind": "answer"}) + "\n")
        written.write(json.dumps({"_id": "b", "title": "", "text": "短"}) + "\n")
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"layer": torch.full((2, 2), 0.5, dtype=torch.float16)}, folder / "model.safetensors")
    config = {"hidden_size": 8, "max_position_embeddings": 512, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the commands of the preparation; each one leaves the files that it would make."""
    run: list[list[str]] = []

    def record(*words: object) -> None:
        command = [str(word) for word in words]
        run.append(command)
        if "export" in command:
            Path(command[command.index("export") + 2]).mkdir()
        elif "index" in command:
            collection = Path(command[command.index("--collection") + 1])
            collection.mkdir()
            (collection / "CURRENT").write_text("v1\n")
        else:
            Path(command[-1]).mkdir()

    monkeypatch.setattr(peers_prepare, "run_command", record)
    monkeypatch.setattr(peers_prepare, "care", record)
    return run


def test_each_file_is_made_once(data: Path, weights: Path, tmp_path: Path, commands: list[list[str]]) -> None:
    folder = tmp_path / "made"
    prepared = prepare(data, weights, folder)
    assert len(commands) == 4  # two encoders, a snapshot, txtai's index
    assert prepare(data, weights, folder) == prepared
    assert len(commands) == 4
    assert prepared.queries == ["头痛"]
    assert prepared.vectors == folder / "collection" / "versions" / "v1" / "vectors.npy"
    assert json.loads(prepared.ids.read_text(encoding="utf-8")) == ["a", "b"]
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [{"_id": "a", "text": "题" + "长" * 499}, {"_id": "b", "text": "短"}]


def test_the_peers_get_the_weights_in_fp32_with_cls_pooling(
    data: Path, weights: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    folder = prepare(data, weights, tmp_path / "made").weights
    assert load_file(folder / "model.safetensors")["layer"].dtype == torch.float32
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    assert (pooling["pooling_mode_cls_token"], pooling["word_embedding_dimension"]) == (True, 8)
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == "float32"


def test_a_folder_of_other_data_is_refused(
    data: Path, weights: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    prepare(data, weights, tmp_path / "made")
    with pytest.raises(BenchError, match="prepared from other data or weights"):
        prepare(tmp_path, weights, tmp_path / "made")


def test_data_without_short_queries_are_refused(data: Path, weights: Path, tmp_path: Path) -> None:
    (data / "one" / "queries.jsonl").write_text(json.dumps({"text": "长" * 65}), encoding="utf-8")
    with pytest.raises(BenchError, match="no query of at most 64 characters"):
        prepare(data, weights, tmp_path / "made")


def test_a_failed_step_is_reported_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"-c .* failed: it broke"):
        run_command("/bin/bash", "-c", "echo it broke >&2; exit 3")


@pytest.mark.parametrize(
    ("form", "body"), [(Form.CARE, {"results": [{"hits": HITS}]}), (Form.TXTAI, HITS)], ids=["care", "txtai"]
)
def test_a_ranking_is_requested_in_the_form_of_the_load(form: Form, body: object) -> None:
    with running(lambda number: [answer(json.dumps(body).encode())]) as server:
        assert ask(server.url, form, "头痛") == IDS
    assert server.lines[0].startswith("GET /search?limit=10&query=%E5" if form is Form.TXTAI else "POST /v1/search")


def test_a_ranking_that_is_short_or_refused_ends_the_run() -> None:
    with running(lambda number: [answer(b"[]")]) as server, pytest.raises(BenchError, match="gave 0 hits, not 10"):
        ask(server.url, Form.TXTAI, "头痛")
    refusal = answer(b"", "500 Internal Server Error")
    with running(lambda number: [refusal]) as server, pytest.raises(BenchError, match="answered 500"):
        ask(server.url, Form.CARE, "头痛")


def test_all_contestants_get_the_same_weights_and_documents(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("collection", "weights", "vectors", "index", "ids", "txtai")]
    encoders = {"int8": tmp_path / "int8", "fp32": tmp_path / "fp32"}
    listed = contestants(Prepared(["头痛"], encoders, *places), tmp_path)
    assert [one.own for one in listed] == [True] * 5 + [False] * 4
    assert [one.server.environment["OMP_NUM_THREADS"] for one in listed[5:]] == ["2", "2", "1", "1"]
    ours, (txtai, infinity) = listed[:5], listed[5:7]
    assert [one.form for one in ours] == [Form.IDS, Form.IDS, Form.CARE, Form.IDS, Form.CARE]
    assert (txtai.form, infinity.form) == (Form.TXTAI, Form.IDS)
    assert {one.server.environment["CARE_COLLECTION"] for one in ours} == {str(places[0])}
    assert [one.server.environment["CARE_WORKERS"] for one in ours] == ["1", "1", "1", "2", "2"]
    used = [one.server.environment["CARE_ENCODER"] for one in ours]
    assert used == [str(encoders[variant]) for variant in ("int8", "fp32", "int8", "int8", "int8")]
    config = json.loads(Path(txtai.server.environment["CONFIG"]).read_text(encoding="utf-8"))
    assert config == {"path": str(places[5]), "embeddings": {"path": str(places[1])}}
    assert list(infinity.server.command[-5:-1]) == [str(place) for place in places[1:5]]
    assert len({one.server.name for one in listed}) == len(listed)
    some = contestants(Prepared(["头痛"], encoders, *places), tmp_path, ["CARE int8"])
    assert [one.name for one in some] == ["CARE int8", *(one.name for one in listed[5:])]
    with pytest.raises(BenchError, match=r"--only CARE int4: not one of CARE int8; CARE fp32; "):
        contestants(Prepared(["头痛"], encoders, *places), tmp_path, ["CARE int8", "CARE int4"])


def test_without_fp32_rankings_are_compared_with_the_first_of_ours(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ask", lambda url, form, query: ["a", "b"] if form is Form.CARE else ["a", "c"])
    ours, theirs = contest.agreements()
    assert (ours.same_first, ours.same_top) == (1.0, 1.0)
    assert (theirs.same_first, theirs.same_top) == (1.0, 0.5)


class FakeServer:
    """Stands for a running server: records when it was paused and resumed."""

    def __init__(self, name: str, port: int, log: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = SimpleNamespace(pid=os.getpid())
        self._name = name
        self._log = log

    def pause(self) -> None:
        self._log.append(f"{self._name} paused")

    def resume(self) -> None:
        self._log.append(f"{self._name} resumed")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def contest(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Contest:
    """Makes ours and a peer, with the client replaced by a recorder of the target of each job."""
    names = {"http://127.0.0.1:8001": "ours", "http://127.0.0.1:8002": "theirs"}

    def record(job: Job) -> Measurement:
        log.append(f"{names[job.url]} {job.connections} from {job.first_number}")
        return Measurement(10, 1.0, [1.0], [100], {}, {})

    monkeypatch.setattr(peers, "measure", record)
    server = Server("any", ["true"], 1)
    started = [
        (Contestant("ours", server, Form.CARE, True), FakeServer("ours", 8001, log)),
        (Contestant("theirs", server, Form.TXTAI, False), FakeServer("theirs", 8002, log)),
    ]
    return Contest(started, ["头痛"], 0.5)  # type: ignore[arg-type]


def test_a_peer_is_paused_unless_it_is_measured(contest: Contest, log: list[str]) -> None:
    assert log == ["theirs paused"]
    contest.run(rounds=1)
    peer = [entry for entry in log[1:] if entry.startswith("theirs")]
    assert [entry.split()[1] for entry in peer] == [
        "resumed",
        "1",
        "paused",
        "resumed",
        "8",
        "paused",
        "resumed",
        "32",
        "paused",
    ]
    assert not any(entry in ("ours paused", "ours resumed") for entry in log)


def test_every_second_round_is_reversed_and_no_query_repeats(contest: Contest, log: list[str]) -> None:
    measured = contest.run(rounds=2)
    asked = [entry for entry in log if " from " in entry]
    order = [entry.rpartition(" from ")[0] for entry in asked]
    assert order[:6] == ["ours 1", "theirs 1", "ours 8", "theirs 8", "ours 32", "theirs 32"]
    assert order[6:] == order[:6][::-1]
    assert [int(entry.rpartition(" ")[2]) for entry in asked] == list(range(0, 120, 10))
    assert {key: len(turns) for key, turns in measured.items()} == {
        (name, connections): 2 for name in ("ours", "theirs") for connections in (1, 8, 32)
    }


def test_a_contestant_without_a_good_answer_ends_the_run(contest: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "measure", lambda job: Measurement(1, 1.0, [], [], {}, {"status 500": 1}))
    with pytest.raises(BenchError, match=r"ours: no good answer \(status 500\)"):
        contest.run(rounds=1)

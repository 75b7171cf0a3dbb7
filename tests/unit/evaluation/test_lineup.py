from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from models.encoder.spec import Side
from models.errors import BadEncoder, CareError, SpaceMismatch
from models.evaluation import lineup
from models.evaluation.encoders import OpenEncoder
from models.evaluation.judge import judge, mean_systems
from models.evaluation.lineup import Lineup, LineupOptions
from models.fusion import Fusion
from tests.support.evaluation import TASKS, TableEncoder, a_spec
from tests.support.json_server import Body, Reply, json_server

OPENED: list[str] = []


@pytest.fixture(autouse=True)
def encoders(monkeypatch: pytest.MonkeyPatch) -> dict[str, TableEncoder]:
    """Makes folders a and b of one space, and c of another."""
    known = {name: TableEncoder(name) for name in "ab"} | {"c": TableEncoder("c", a_spec(space="other"))}
    OPENED.clear()

    def open_encoder(text: str) -> OpenEncoder:
        OPENED.append(text)
        return known[text].opened()

    monkeypatch.setattr(lineup, "open_encoder", open_encoder)
    return known


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def names_of(options: LineupOptions, folder: Path) -> list[str]:
    with ExitStack() as stack:
        return [system.facts.name for system in Lineup(options, folder, stack, lambda count: None).systems]


def test_an_encoder_is_compared_with_the_baselines(tmp_path: Path) -> None:
    assert names_of(LineupOptions(encoders=["a"]), tmp_path) == ["BM25", "a", "hybrid a"]
    assert names_of(LineupOptions(encoders=["a"], bm25=False, hybrid=False), tmp_path) == ["a"]


def test_pairs_and_encoders_share_opened_encoders(tmp_path: Path) -> None:
    options = LineupOptions(encoders=["a"], pairs=[("a", "b"), ("b", "a")], bm25=False, hybrid=False)
    assert names_of(options, tmp_path) == ["a", "a + b", "b + a"]
    assert OPENED == ["a", "b"]


def test_every_fusion_is_a_system(tmp_path: Path) -> None:
    ways = LineupOptions(encoders=["a"], bm25=False, fusions=[Fusion.RECIPROCAL, Fusion.SCORES], weights=[0.3, 0.5])
    assert names_of(ways, tmp_path) == ["a", "hybrid a reciprocal", "hybrid a 0.3", "hybrid a 0.5"]


def test_every_number_of_dimensions_is_a_system(tmp_path: Path) -> None:
    assert names_of(LineupOptions(encoders=["a"], dims=[1], bm25=False, hybrid=False), tmp_path) == ["a", "a 1d"]
    with pytest.raises(CareError, match="--dims 3: a has 2"):
        names_of(LineupOptions(encoders=["a"], dims=[3]), tmp_path)


def test_one_run_encodes_a_text_once_for_all_its_systems(
    tmp_path: Path, stack: ExitStack, encoders: dict[str, TableEncoder]
) -> None:
    done: list[int] = []
    options = LineupOptions(encoders=["a"], pairs=[("a", "b")], dims=[1], weights=[0.5])
    table = Lineup(options, tmp_path, stack, done.append)
    outstanding = table.outstanding(TASKS)
    judge(TASKS, table.systems)
    assert sum(done) == outstanding > 0
    assert sorted(encoders["a"].asked) == sorted(set(encoders["a"].asked))
    again = Lineup(options, tmp_path, stack, lambda count: pytest.fail("encoded again"))
    assert again.outstanding(TASKS) == 0
    judge(TASKS, again.systems)


def test_encoders_of_two_spaces_are_refused_as_a_pair(tmp_path: Path) -> None:
    with pytest.raises(SpaceMismatch):
        names_of(LineupOptions(pairs=[("a", "c")]), tmp_path)


def test_an_encoder_of_one_side_can_only_be_used_in_a_pair(tmp_path: Path, encoders: dict[str, TableEncoder]) -> None:
    for name, side in (("a", Side.QUERY), ("b", Side.DOCUMENT)):
        encoders[name].spec = a_spec().model_copy(update={"sides": (side,)})
    assert names_of(LineupOptions(pairs=[("a", "b")], bm25=False, hybrid=False), tmp_path) == ["a + b"]
    for options in (LineupOptions(encoders=["a"]), LineupOptions(encoders=["b"]), LineupOptions(pairs=[("b", "a")])):
        with pytest.raises(BadEncoder, match=r"is not made to read a (query|document); give it as half of a --pair"):
            names_of(options, tmp_path)


def test_two_systems_may_not_have_one_name(tmp_path: Path) -> None:
    with pytest.raises(CareError, match="two systems are called 'a'"):
        names_of(LineupOptions(encoders=["a", "a"]), tmp_path)


def test_nothing_to_judge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CareError, match="no system to judge"):
        names_of(LineupOptions(bm25=False), tmp_path)


def test_hyde_is_applied_to_every_encoder_and_sends_the_key(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with json_server(lambda path, body: (200, {"choices": [{"message": {"content": "猫"}}]})) as model:
        options = LineupOptions(encoders=["a"], hyde=(model.url, "m"), hyde_documents=2, bm25=False, hybrid=False)
        table = Lineup(options, tmp_path, stack, lambda count: None)
        assert [system.facts.name for system in table.systems] == ["a", "HyDE a × 2"]
        judgement = judge(TASKS, table.systems)
    assert [result.set_name for result in judgement.results if result.system.startswith("HyDE")] == ["pets", "lists"]
    assert list(judgement.not_applicable) == ["HyDE a × 2"]
    assert {headers["authorization"] for _, _, headers in model.requests} == {"Bearer secret"}


def test_hyde_seeds_and_fusions_are_systems_and_seeds_are_averaged(tmp_path: Path, stack: ExitStack) -> None:
    def write(path: str, body: Body) -> Reply:
        assert body is not None
        return 200, {"choices": [{"message": {"content": ["猫", "狗"][body["seed"]]}}]}

    with json_server(write) as model:
        options = LineupOptions(
            encoders=["a"], hyde=(model.url, "m"), hyde_seeds=2, hyde_fusing=("mean", "document"), hyde_at_once=1,
            bm25=False, hybrid=False,
        )  # fmt: skip
        table = Lineup(options, tmp_path, stack, lambda count: None)
        judgement = judge(TASKS[:1], table.systems)
    by_name = {result.system: result for result in judgement.results}
    names = [f"HyDE a{way}, {which}" for way in ("", " (document)") for which in ("seed 1", "seed 2")]
    means = ["HyDE a, mean of 2 seeds", "HyDE a (document), mean of 2 seeds"]
    assert list(by_name) == ["a", *names, *means]
    assert [facts.name for facts in mean_systems([system.facts for system in table.systems])] == means
    first, second, mean = (by_name[name] for name in (*names[2:], means[1]))
    assert first.value == 100 > second.value, "the answers are the document that seed 1 writes"
    assert mean.value == pytest.approx((first.value + second.value) / 2)
    figures = [[query.metrics[mean.main_metric] for query in result.queries] for result in (first, second, mean)]
    assert figures[2] == pytest.approx([(one + other) / 2 for one, other in zip(*figures[:2], strict=True)])


def test_a_service_is_searched_in_the_given_mode(tmp_path: Path) -> None:
    collection = {"documents": 2, "encoder": {"fingerprint": "f", "dim": 2}, "max_queries": 8, "max_top_k": 100,
                  "default_mode": "hybrid"}  # fmt: skip
    with json_server(lambda path, body: (200, collection)) as server:
        options = LineupOptions(services=[server.url, f"{server.url},mode=dense"])
        assert names_of(options, tmp_path) == ["BM25", "service hybrid", "service dense"]
        with pytest.raises(CareError, match="mode=fast: choose from dense, lexical, hybrid"):
            names_of(LineupOptions(services=[f"{server.url},mode=fast"]), tmp_path)


def test_rerankers_are_applied_to_encoders_and_hybrids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup, "open_reranker", lambda text: (text, None))
    options = LineupOptions(encoders=["a"], bm25=False, rerankers=["r"], rerank_depth=5)
    assert names_of(options, tmp_path) == ["a", "hybrid a", "a, r 5", "hybrid a, r 5"]

"""Sets that mteb and datasets provide, loaded by their real code from local folders; nothing is downloaded."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants as hub

from models.evaluation import benchmarks as spec
from models.evaluation.benchmarks import Benchmark, SetSpec
from models.evaluation.benchmarks import loader as libraries
from models.evaluation.benchmarks.loader import load
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet

MTEB_TYPES = {Kind.RETRIEVAL: "Retrieval", Kind.RERANK: "Reranking", Kind.STS: "STS"}
BENCHMARKS = [spec.read(name) for name in spec.names()]


@pytest.fixture(scope="module")
def ours() -> ModuleType:
    """Imports our tasks and mteb on demand: it takes seconds, too long for every process that collects this file."""
    from tests.support import mteb_tasks

    return mteb_tasks


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes offline, and puts what datasets prepares into a folder of the test."""
    import datasets

    for module in (hub, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "downloaded"))


def item(kind: Kind, metric: str, **facts: object) -> SetSpec:
    return SetSpec.model_validate(
        {"name": "ours", "kind": kind, "metric": metric, "counts": {"queries": 1}, "obtain": "-", **facts}
    )


def write_repository(folder: Path, tables: Mapping[tuple[str, str], Iterable[Mapping[str, object]]]) -> str:
    """Writes a dataset repository as on the Hugging Face hub: one JSON file per table, and a card that lists them."""
    folder.mkdir()
    card = ["---", "configs:"]
    for (subset, split), rows in tables.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"{subset}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        card += [f"- config_name: {subset}", "  data_files:", f"  - split: {split}", f"    path: {subset}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
    return str(folder)


def loaded(task: type) -> object:
    made = task()
    made.load_data()
    return made


def test_a_retrieval_task_becomes_a_set_with_titles_before_texts(ours: ModuleType) -> None:
    found = libraries.from_mteb(loaded(ours.OurRetrieval), item(Kind.RETRIEVAL, "nDCG@10"))
    assert isinstance(found, RetrievalSet)
    assert found.document_ids == list(ours.DOCUMENTS)
    assert found.documents[0] == "\n".join(ours.DOCUMENTS["d-pressure"])
    assert found.documents[2] == ours.DOCUMENTS["d-cold"][1]
    assert dict(zip(found.query_ids, found.queries, strict=True)) == ours.QUERIES
    assert found.qrels == ours.QRELS


def test_a_reranking_task_becomes_lists_of_candidates_with_grades(ours: ModuleType) -> None:
    found = libraries.from_mteb(loaded(ours.OurReranking), item(Kind.RERANK, "MAP@10", relevant=2))
    assert isinstance(found, RerankSet)
    assert found.queries == list(ours.QUERIES.values())
    assert [[grade for _, grade in candidates] for candidates in found.candidates] == [
        [0, 1, 0],
        [1, 2, 0],
        [0, 1],
        [1, 1, 0, 0],
    ]
    assert found.candidates[1][1][0] == ours.DOCUMENTS["d-flu"][1]
    assert found.relevant == 2


def test_a_similarity_task_becomes_pairs(ours: ModuleType) -> None:
    found = libraries.from_mteb(loaded(ours.OurSTS), item(Kind.STS, "Pearson"))
    assert isinstance(found, PairSet)
    assert [(*pair, score) for pair, score in zip(found.pairs, found.scores, strict=True)] == ours.PAIRS


@pytest.mark.parametrize(
    ("benchmark", "named"),
    [(benchmark, named) for benchmark in BENCHMARKS for named in benchmark.sets if named.mteb],
    ids=lambda value: value.name,
)
def test_the_named_tasks_are_in_mteb_with_this_kind_split_and_size(
    ours: ModuleType, benchmark: Benchmark, named: SetSpec
) -> None:
    metadata = ours.mteb.get_task(named.mteb, eval_splits=[named.split]).metadata
    assert metadata.type == MTEB_TYPES[named.kind]
    assert named.split in metadata.eval_splits
    facts = metadata.descriptive_stats[named.split]
    assert named.counts.queries == facts.get("num_queries", facts["num_samples"])
    if named.kind is Kind.RETRIEVAL:
        assert named.counts.documents == facts["num_documents"]


def test_a_set_is_loaded_into_its_benchmark_by_mtebs_own_loader(
    ours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = write_repository(
        tmp_path / "repository",
        {
            ("corpus", "corpus"): [
                {"_id": "1", "title": "Colds", "text": "They pass."},
                {"_id": "2", "title": "", "text": "Broken arm."},
            ],
            ("queries", "queries"): [{"_id": "7", "text": "cold"}, {"_id": "8", "text": "another split's"}],
            ("default", "test"): [{"query-id": "7", "corpus-id": "1", "score": 1}],
        },
    )
    monkeypatch.setitem(ours.mteb.get_task("SciFact").metadata.dataset, "path", repository)
    facts = 'title = "T"\nabout = "A"\nsource = "S"\nlicence = "L"\n[[sets]]\nname = "scifact"\nkind = "retrieval"\n'
    rest = 'metric = "nDCG@10"\nmteb = "SciFact"\ncounts = {queries = 1, documents = 2}\n'
    (tmp_path / "ours.toml").write_text(facts + rest)
    monkeypatch.setattr(spec, "FOLDER", tmp_path)
    tasks, missing = load("ours", None)
    assert missing == {}
    (found,) = (task.data for task in tasks)
    assert found == RetrievalSet(
        "scifact", ["1", "2"], ["Colds\nThey pass.", "Broken arm."], ["7"], ["cold"], {"7": {"1": 1}}
    )


def test_three_tables_of_a_dataset_become_a_retrieval_set(tmp_path: Path) -> None:
    repository = write_repository(
        tmp_path / "repository",
        {
            ("corpus", "corpus"): [{"id": "p1", "text": "普通感冒"}, {"id": "p2", "text": "骨折"}],
            ("queries", "queries"): [{"id": "q1", "text": "着凉"}],
            ("default", "test"): [{"q_id": "q1", "p_id": "p1", "score": 1}],
        },
    )
    found = libraries.fetch(item(Kind.RETRIEVAL, "nDCG@10", hub=repository))
    assert found == RetrievalSet("ours", ["p1", "p2"], ["普通感冒", "骨折"], ["q1"], ["着凉"], {"q1": {"p1": 1}})


def test_a_judgement_of_an_unknown_document_is_named(tmp_path: Path) -> None:
    repository = write_repository(
        tmp_path / "repository",
        {
            ("corpus", "corpus"): [{"id": "p1", "text": "普通感冒"}],
            ("queries", "queries"): [{"id": "q1", "text": "着凉"}],
            ("default", "test"): [{"q_id": "q1", "p_id": "p9", "score": 1}],
        },
    )
    with pytest.raises(libraries.Unavailable, match="document 'p9' of query 'q1' is not in the corpus"):
        libraries.fetch(item(Kind.RETRIEVAL, "nDCG@10", hub=repository))


def test_a_table_of_papers_and_candidates_becomes_a_reranking_set(tmp_path: Path) -> None:
    candidates = [{"title": "Near", "abstract": "It is.", "score": 2}, {"title": "Far", "abstract": None, "score": 0}]
    row = {"query": {"title": "Paper", "abstract": "Abstract."}, "candidates": candidates}
    repository = write_repository(tmp_path / "repository", {("relish", "evaluation"): [row]})
    found = libraries.fetch(item(Kind.RERANK, "MAP@10", hub=repository, subset="relish", split="evaluation"))
    assert found == RerankSet("ours", ["Paper\nAbstract."], [[("Near\nIt is.", 2), ("Far", 0)]])


def test_sets_that_were_never_downloaded_are_listed_without_a_hang() -> None:
    tasks, missing = load("cmirb", None)
    assert tasks == []
    assert len(missing) == 10
    assert missing["medexam"].startswith("hub dataset CMIRB/MedExamRetrieval: ConnectionError: ")
    assert missing["cmedqa"].startswith("mteb task CmedqaRetrieval: ConnectionError: ")
    assert missing["cmedqa"].endswith("; or put queries.jsonl, corpus.jsonl and qrels.tsv in DATA/cmedqa")

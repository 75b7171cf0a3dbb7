"""Benchmark files: the shipped ones match the papers, and errors are named with file and field."""

from pathlib import Path

import pytest

from models.errors import BadData, CareError
from models.evaluation.benchmarks import Counts, names, read, read_file
from models.evaluation.sets import Kind

GOOD = """
title = "Ours"
about = "Two sets"
source = "none"
licence = "CC0"

[prompts]
question = "Answer this: {query}"

[[sets]]
name = "one"
kind = "retrieval"
metric = "nDCG@10"
counts = {queries = 2, documents = 3}
mteb = "SciFact"
hyde = "question"

[[sets]]
name = "two"
kind = "sts"
metric = "Pearson"
counts = {queries = 4}
obtain = "write it"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "ours.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_lists_its_sets_and_gives_the_benchmark_its_name(tmp_path: Path) -> None:
    benchmark = read_file(write(tmp_path, GOOD))
    assert benchmark.name == "ours"
    assert [(item.name, item.kind, item.split) for item in benchmark.sets] == [
        ("one", Kind.RETRIEVAL, "test"),
        ("two", Kind.STS, "test"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('title = "Ours"', "", "title: Field required"),
        ('title = "Ours"', 'title = "Ours"\nowner = "us"', "owner: Extra inputs are not permitted"),
        ('licence = "CC0"', "licence = 3", "licence"),
        ('kind = "sts"', 'kind = "clustering"', "sets.1.kind"),
        ('metric = "Pearson"', 'metric = "nDCG@10"', "metric 'nDCG@10' is not one of Pearson, Spearman"),
        ("queries = 4", "queries = 0", "sets.1.counts.queries"),
        ('mteb = "SciFact"', 'mteb = "SciFact"\nhub = "a/b"', "not both"),
        ('obtain = "write it"', "", "give mteb, hub or obtain"),
        ('name = "two"', 'name = "one"', "two sets have one name"),
        ("this: {query}", "this.", "prompt 'question' must hold {query} once"),
        ('hyde = "question"', 'hyde = "title"', "[prompts] lacks title"),
        ("[[sets]]", "[[sets", "not TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(BadData) as caught:
        read_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert field in str(caught.value)


def test_an_unknown_name_gives_an_error_with_the_known_names() -> None:
    with pytest.raises(CareError, match=r"no benchmark is called 'mteb'; there are .*cmirb"):
        read("mteb")
    with pytest.raises(CareError, match="no benchmark"):
        read("../training/recipes/care-small-zh")


@pytest.mark.parametrize(
    ("name", "sets", "queries", "documents"),
    [
        ("cmedteb", 5, 734 + 1128 + 5000 + 1000 + 1000, 229457),
        ("cmirb", 10, 10962, 27871 + 56441 + 54021 + 100999 + 100001 + 12577 + 100001 + 27570 + 36703 + 36758),
        ("cardioembed", 4, 6259 + 100 + 300 + 323, 6259 + 5183 + 3633),
        ("care-gold-pool", 10, 697 + 318 + 1255 + 943 + 439 + 1879 + 300 + 57 + 4000 + 100, 5 * 30246 + 37645 + 5183),
    ],
)
def test_the_shipped_files_have_the_sizes_of_the_papers(name: str, sets: int, queries: int, documents: int) -> None:
    benchmark = read(name)
    assert len(benchmark.sets) == sets
    assert sum(item.counts.queries for item in benchmark.sets) == queries
    assert sum(item.counts.documents or 0 for item in benchmark.sets) == documents


def test_the_eleven_sets_of_bmretriever_have_the_kinds_of_its_five_tasks() -> None:
    kinds = {item.name: item.kind for item in read("bmretriever").sets}
    assert len(kinds) == 11
    assert [name for name, kind in kinds.items() if kind is Kind.LINKING] == ["drugbank", "mesh"]
    assert [name for name, kind in kinds.items() if kind is Kind.RERANK] == ["relish"]
    assert [name for name, kind in kinds.items() if kind is Kind.STS] == ["biosses"]


def test_the_public_sets_of_cardioembed_are_judged_without_an_instruction() -> None:
    """The encoder reads bare texts (section 2.2); table 2 prints these metrics."""
    public = {item.name: item for item in read("cardioembed").sets if item.mteb}
    assert {name: item.metric for name, item in public.items()} == {
        "biosses": "Spearman", "scifact": "nDCG@10", "nfcorpus": "nDCG@10"
    }  # fmt: skip
    assert {item.query_instruction for item in public.values()} == {None}


def test_every_set_of_cmirb_has_a_prompt_and_an_instruction_of_its_own() -> None:
    benchmark = read("cmirb")
    prompts = [benchmark.hyde_prompt(item) for item in benchmark.sets]
    assert all("{query}" in (prompt or "") for prompt in prompts)
    assert len(set(prompts)) == 3
    assert len({item.query_instruction for item in benchmark.sets}) == 10


def test_the_gold_pool_warns_and_keeps_the_encoders_own_instruction() -> None:
    benchmark = read("care-gold-pool")
    assert benchmark.note is not None
    assert "never compare with the published leaderboard" in benchmark.note
    assert all(item.query_instruction is None for item in benchmark.sets)


def test_benchmark_names_are_those_of_the_files() -> None:
    assert names() == ["bmretriever", "cardioembed", "care-gold-pool", "cmedteb", "cmirb"]
    assert all(read(name).name == name for name in names())


@pytest.mark.parametrize(
    ("counts", "found", "difference"),
    [
        (Counts(queries=10, documents=100), (10, 100), None),
        (Counts(queries=10), (10, None), None),
        (Counts(queries=10, documents=100), (9, 100), "9 queries where the benchmark has 10"),
        (Counts(queries=10, documents=100), (10, 101), "101 documents where the benchmark has 100"),
        (Counts(queries=3200, rounded=True), (3190, None), None),
        (Counts(queries=3200, rounded=True), (3000, None), "3,000 queries where the benchmark has about 3,200"),
    ],
)
def test_a_different_size_is_described(counts: Counts, found: tuple[int, int | None], difference: str | None) -> None:
    assert counts.differ(*found) == difference

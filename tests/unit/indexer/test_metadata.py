"""Filters: each condition on each kind of field, missing values, and filters that cannot be evaluated."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BadFilter, BadSnapshot
from indexer.store.filters import MAX_FIELDS, AnyOf, Condition, Either, Equal, Filter, Metadata, Not, Range
from indexer.store.metadata import FACET_VALUES, MetadataIndex
from indexer.store.snapshot import Snapshot
from indexer.store.writer import MetadataWriter


def index(folder: Path, rows: list[Metadata]) -> MetadataIndex:
    writer = MetadataWriter(folder, ExitStack())
    for row in rows:
        writer.add(row)
    writer.close()
    return MetadataIndex.open(folder, len(rows))


ROWS: list[Metadata] = [
    {"kind": "drug", "year": 2020, "tags": ["心", "血"], "updated": "2025-01-31"},
    {"kind": "test", "year": 2021.5, "tags": "血", "updated": "2025-02-01", "rx": True},
    {"kind": "drug", "year": -1, "tags": [], "updated": None, "rx": False},
    {},
    {"kind": "Drug", "tags": ["肺"], "updated": "2026-01-01"},
]


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ([], [0, 1, 2, 3, 4]),
        ([Equal("kind", "drug")], [0, 2]),
        ([Equal("kind", "nothing")], []),
        ([Equal("year", 2020)], [0]),
        ([Equal("year", "2021.5")], [1]),
        ([Equal("tags", "血")], [0, 1]),
        ([Equal("rx", True)], [1]),
        ([Equal("rx", "false")], [2]),
        ([AnyOf("kind", ("test", "Drug", "nothing"))], [1, 4]),
        ([AnyOf("kind", ())], []),
        ([AnyOf("year", (-1, "2020"))], [0, 2]),
        ([AnyOf("tags", ("肺", "心"))], [0, 4]),
        ([Range("updated", gte="2025-02-01")], [1, 4]),
        ([Range("updated", gt="2025-02-01")], [4]),
        ([Range("updated", lte="2025-02-01")], [0, 1]),
        ([Range("updated", lt="2025-02-01")], [0]),
        ([Range("updated", gte="2025-01-01", lt="2026-01-01")], [0, 1]),
        ([Range("updated", gte="2027", lt="2024")], []),
        ([Range("year", gt=-1)], [0, 1]),
        ([Range("year", gte=-1, lt=2021)], [0, 2]),
        ([Range("year", lte="2020")], [0, 2]),
        ([Range("tags", gte="心", lte="肺")], [0, 4]),
        ([Equal("kind", "drug"), Range("year", gt=0)], [0]),
        ([Not(Equal("kind", "drug"))], [1, 3, 4]),
        ([Not(Equal("tags", "血"))], [2, 3, 4]),
        ([Not(AnyOf("color", ()))], [0, 1, 2, 3, 4]),
        ([Either((Equal("kind", "test"), Range("year", lt=0)))], [1, 2]),
        ([Either((AnyOf("color", ()), Equal("rx", True)))], [1]),
        ([Not(Either((Equal("kind", "drug"), Not(Equal("rx", True)))))], [1]),
        ([Either((Equal("kind", "drug"), Equal("kind", "Drug"))), Not(Range("year", lt=0))], [0, 4]),
    ],
)
def test_filters_select_the_expected_rows(tmp_path: Path, filters: list[Filter], rows: list[int]) -> None:
    assert np.flatnonzero(index(tmp_path, ROWS).select(filters)).tolist() == rows


@given(
    values=st.lists(st.none() | st.text("aäb文𠀀", max_size=3), min_size=1, max_size=30),
    low=st.text("aäb文𠀀", max_size=3),
    high=st.text("aäb文𠀀", max_size=3),
)
def test_text_ranges_are_ordered_by_code_points(
    tmp_path_factory: pytest.TempPathFactory, values: list[str | None], low: str, high: str
) -> None:
    values.append("a")  # a field that no document has does not exist
    metadata = index(tmp_path_factory.mktemp("metadata"), [{"f": value} for value in values])
    expected = [value is not None and low <= value < high for value in values]
    assert metadata.select([Range("f", gte=low, lt=high)]).tolist() == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (Equal("color", "red"), "no such field; it has kind, rx, tags, updated, year"),
        (Range("kind"), "at least one of gte"),
        (Equal("year", "new"), "'new' is not a number"),
        (Range("year", gte=True), "True is not a number"),
        (Equal("year", "nan"), "'nan' is not a number"),
        (Equal("kind", 3), "3 is not a text"),
        (Range("tags", lt=1.5), "1.5 is not a text"),
    ],
)
def test_the_error_of_an_unsuitable_filter_names_its_field(tmp_path: Path, condition: Condition, message: str) -> None:
    for nested in (condition, Not(condition), Either((Equal("kind", "drug"), Not(condition)))):
        with pytest.raises(BadFilter, match=message) as caught:
            index(tmp_path, ROWS).select([nested])
        assert caught.value.field == condition.field


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        (Equal("knd", "drug"), 'did you mean kind?; for example {"field":"kind","eq":"Drug"}'),
        (Equal("colour", "red"), '; for example {"field":"kind","eq":"Drug"}'),
        (Equal("year", "new"), '; for example {"field":"year","eq":2020.0}'),
        (Range("kind", gte=3), '; for example {"field":"kind","eq":"Drug"}'),
    ],
)
def test_a_filter_error_ends_with_an_example_that_is_accepted(tmp_path: Path, condition: Filter, hint: str) -> None:
    metadata = index(tmp_path, ROWS)
    with pytest.raises(BadFilter) as caught:
        metadata.select([condition])
    assert str(caught.value).endswith(hint)
    example = json.loads(str(caught.value).partition("for example ")[2])
    assert metadata.select([Equal(example["field"], example["eq"])]).any()


def test_64_bit_integers_are_compared_exactly(tmp_path: Path) -> None:
    """As numbers and as texts of a URL; float64 holds only 53 bits."""
    first = 110101199001011234
    metadata = index(tmp_path, [{"pid": first}, {"pid": first + 1}, {"pid": 1.5}, {}])
    for value in (first + 1, str(first + 1)):
        assert metadata.select([Equal("pid", value)]).tolist() == [False, True, False, False]
        assert metadata.select([Range("pid", gte=value)]).tolist() == [False, True, False, False]
        assert metadata.select([Range("pid", lt=value)]).tolist() == [True, False, True, False]
        assert metadata.select([AnyOf("pid", (value, 1.5))]).tolist() == [False, True, True, False]
    assert metadata.select([Equal("pid", first + 2)]).sum() == 0
    assert metadata.select([Range("pid", lt=10**400)]).tolist() == [True, True, True, False]
    assert metadata.ranges == {"pid": (1.5, first + 1)}
    with pytest.raises(BadFilter, match=f'"eq":{first}}}'):
        metadata.select([Equal("other", 1)])


def test_documents_without_metadata_have_no_fields(tmp_path: Path) -> None:
    metadata = index(tmp_path, [{}, {}])
    assert metadata.fields == []
    assert metadata.select([]).all()
    assert metadata.facets() == {}


def test_facets_count_documents_of_fields_with_few_values(tmp_path: Path) -> None:
    rows: list[Metadata] = [{"url": f"u{i}", "kind": "ab"[i % 3 == 0], "n": i} for i in range(FACET_VALUES + 1)]
    rows[0] = {**rows[0], "tags": ["x", "y", "x"]}
    rows[1] = {**rows[1], "tags": "x"}
    assert index(tmp_path, rows).facets() == {"kind": {"a": 34, "b": 17}, "tags": {"x": 2, "y": 1}}


def test_snapshot_answers_filters_over_its_documents(snapshot: Snapshot) -> None:
    mask = snapshot.metadata.select([Equal("tags", "心脏")])
    assert [snapshot.documents.get(row).id for row in np.flatnonzero(mask)] == ["drug-1", "disease-1"]
    assert snapshot.metadata.facets()["kind"] == {"drug": 2, "disease": 1}


def test_an_unreadable_field_list_is_refused(tmp_path: Path) -> None:
    index(tmp_path, ROWS)
    (tmp_path / "metadata.json").write_text('[{"name": "kind", "kind": "colour"}]')
    with pytest.raises(BadSnapshot, match=r"metadata\.json is unreadable"):
        MetadataIndex.open(tmp_path, len(ROWS))


@pytest.mark.parametrize("name", ["*.vocabulary.bin", "*.codes.npy"])
def test_a_damaged_column_is_refused(tmp_path: Path, name: str) -> None:
    index(tmp_path, [{"kind": "药"}, {"kind": "drug"}])
    (file,) = tmp_path.glob(name)
    file.write_bytes(file.read_bytes()[:-1] + b"d")  # half a character, or a code far out of range
    with pytest.raises(BadSnapshot, match="build the snapshot again"):
        MetadataIndex.open(tmp_path, 2).facets()


def test_fields_beyond_the_limit_have_no_column_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each column needs open files: a document with a thousand fields must not stop a build or a service."""
    names = [f"f{number:04}" for number in range(MAX_FIELDS + 5)]
    found = index(tmp_path, [dict.fromkeys(names, 1), {names[0]: 2, names[-1]: 2}])
    assert found.fields == names[:MAX_FIELDS]
    assert found.select([Equal(names[0], 2)]).tolist() == [False, True]
    assert "5 metadata fields, such as f0200, come after the first 200" in caplog.text

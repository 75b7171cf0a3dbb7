"""Columns of some documents only: as if built from these, with nothing of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import BadFilter
from indexer.store.filters import NUMBER, TEXT, AnyOf, Either, Equal, Filter, Not, Range, restrict, suits
from indexer.store.metadata import MetadataIndex, admits
from indexer.store.snapshot import Snapshot
from tests.unit.indexer.support import Entry, write_snapshot

OWNER = st.sampled_from(["a", "b", "c"])
DOCUMENT = st.fixed_dictionaries(
    {"owner": OWNER},
    optional={
        "kind": st.sampled_from(["drug", "test", ""]),
        "tags": st.lists(st.sampled_from("xyz"), max_size=3),
        "number": st.one_of(st.integers(-5, 5), st.just(2**62 + 1), st.floats(-2, 2)),
        "flag": st.booleans(),
    },
)
FILTERS: list[tuple[Filter, ...]] = [
    (Equal("owner", "a"),),
    (AnyOf("owner", ("a", "c")), Not(Equal("flag", "true"))),
    (Either((Equal("tags", "x"), Range("number", gte=1))),),
    (Range("number", lt="2"),),
    (AnyOf("owner", ()),),
]


@settings(max_examples=60)
@given(documents=st.lists(DOCUMENT, min_size=1, max_size=12), filters=st.sampled_from(FILTERS))
def test_a_part_equals_an_index_of_its_documents(
    documents: list[dict[str, Any]], filters: tuple[Filter, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("part") / "v1"
    write_snapshot(folder, [Entry(str(number), "text", metadata=each) for number, each in enumerate(documents)])
    whole = Snapshot.open(folder).metadata
    known = restrict(filters, whole.kinds.__contains__)
    chosen = [each for each in documents if admits(filters, each)]
    assert whole.select(known).tolist() == [each in chosen for each in documents], "one by one or as columns"
    for part in (whole.part(known), MetadataIndex.of(documents).part(known)):
        alone = MetadataIndex.of(chosen)
        assert part.kinds == alone.kinds
        assert part.facets() == alone.facets()
        assert part.ranges == alone.ranges
        for more in FILTERS:
            own = restrict(more, part.kinds.__contains__)
            assert part.select(own).tolist() == alone.select(own).tolist()
    assert whole.part(known) is whole.part(known)


def test_an_error_of_a_part_reveals_nothing_of_other_documents() -> None:
    documents = [{"owner": "a", "mine": "x"}, {"owner": "secret", "theirs": "hidden", "number": 7}]
    part = MetadataIndex.of(documents).part((Equal("owner", "a"),))
    for wrong in (Equal("theirs", "x"), Equal("owner", 5), Equal("number", 7)):
        with pytest.raises(BadFilter) as error:
            part.select([wrong])
        message = str(error.value).replace("filter on theirs", "").replace("filter on number", "")
        assert not any(name in message.split("did you mean")[0] for name in ("secret", "hidden", "theirs", "number,"))


@pytest.mark.parametrize(
    ("filters", "suited"),
    [
        ((Equal("text", "a"), Equal("number", 1), Equal("absent", "a")), True),
        ((Equal("number", "12"), Range("number", gte=1.5, lt="3")), True),
        ((Equal("text", True), AnyOf("text", ("a", "b"))), True),
        ((Equal("text", 1),), False),
        ((Equal("number", "one"),), False),
        ((Equal("number", True),), False),
        ((Equal("number", "nan"),), False),
        ((Not(Either((Equal("text", "a"), AnyOf("number", (1, "x"))))),), False),
        ((Range("text", lt=3),), False),
    ],
)
def test_filters_that_suit_the_fields_never_fail(filters: tuple[Filter, ...], suited: bool) -> None:
    index = MetadataIndex.of([{"text": "a", "number": 1}])
    assert suits(filters, {"text": TEXT, "number": NUMBER}) == suited
    known = restrict(filters, index.kinds.__contains__)
    if suited:
        index.select(known)
    else:
        assert not admits(filters, {"text": "a", "number": 1})
        with pytest.raises(BadFilter):
            index.select(known)

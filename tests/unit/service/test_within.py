"""A serving restricted by a key's filters: errors, fields, kinds and facets as if other documents did not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexer.errors import BadFilter
from indexer.store.filters import MAX_FIELDS, AnyOf, Equal, Filter, Not, Range, fields_of, restrict
from indexer.store.fresh_log import Deleted, Posted
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot
from service.serving.serving import NOTHING, Serving, count_facets, number_ranges
from tests.unit.indexer.support import Entry, unit_vectors, write_snapshot
from tests.unit.service.test_fresh_overlay import frames, serving_of

A, B = (Equal("tenant", "a"),), (Equal("tenant", "b"),)


def posted(name: str, **metadata: Any) -> Posted:  # noqa: ANN401 (whatever a field holds)
    return Posted(name, "", "文", metadata, [(0, 1)], "fp", unit_vectors(1))


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder: Path = tmp_path_factory.mktemp("within") / "v1"
    entries = [
        Entry("a1", "文", "", {"tenant": "a", "level": "secret-a", "only_a": "x"}),
        Entry("b1", "文", "", {"tenant": "b", "only_b": "secret-b"}),
    ]
    write_snapshot(folder, entries)
    return Snapshot.open(folder)


def refusal(serving: Serving, within: tuple[Filter, ...], *filters: Filter) -> str:
    with pytest.raises(BadFilter) as refused:
        serving.require_filters(filters, within)
    return str(refused.value)


def test_an_error_names_only_fields_of_visible_documents_including_posted_ones(main: Snapshot) -> None:
    overlay = Overlay(main).apply(frames(posted("a2", tenant="a", new_a=1), posted("b2", tenant="b", new_b="secret-b")))
    serving = serving_of(main, overlay)
    for filters in ((Equal("absent", 1),), (Equal("only_b", "x"),), (Not(Equal("new_b", 1)),)):
        message = refusal(serving, A, *filters)
        assert "it has level, new_a, only_a, tenant" in message
        assert "secret-b" not in message
    assert "it has new_b, only_b, tenant" in refusal(serving, B, Equal("new_a", 1))
    serving.require_filters((Equal("new_a", 1), Equal("level", "x")), A)
    assert serving.fields(A) == ["level", "new_a", "only_a", "tenant"]


def test_a_field_has_the_kind_of_its_visible_documents(main: Snapshot) -> None:
    changed = frames(Deleted("a1"), posted("a2", tenant="a", level=5))
    serving = serving_of(main, Overlay(main).apply(changed))
    serving.require_filters((Range("level", gte=3),), A)
    assert serving.allowed((*A, Range("level", gte=3))).tolist() == [False, False]
    assert serving.overlay.chosen((*A, Range("level", gte=3))).tolist() == [2]
    assert "'high' is not a number" in refusal(serving, A, Equal("level", "high"))
    assert "secret" not in refusal(serving, A, Equal("level", "high"))
    assert number_ranges(serving, A) == {"level": (5.0, 5.0)}
    assert count_facets(serving, A) == {"tenant": {"a": 1}}


def test_an_evaluable_filter_raises_no_error_on_documents_of_other_tenants(main: Snapshot) -> None:
    """After a rollback documents may differ in kind: an evaluation error would show a value of another tenant."""
    serving = serving_of(main, Overlay(main).apply(frames(posted("b2", tenant="b", level=5))))
    serving.require_filters((Equal("level", 5),), B)
    with pytest.raises(BadFilter, match="secret-a"):
        serving.allowed((*B, Equal("level", 5)))
    assert not serving.allowed((*B, *serving.evaluable((Equal("level", 5),)))).any()


def test_facets_omit_fields_without_visible_documents(main: Snapshot) -> None:
    changed = frames(Deleted("a1"), posted("a2", tenant="a"), posted("b2", tenant="b", level="secret-b", only_a="y"))
    serving = serving_of(main, Overlay(main).apply(changed))
    assert count_facets(serving, A) == {"tenant": {"a": 1}}


def test_a_filter_that_admits_nothing_names_no_field(main: Snapshot) -> None:
    fresh = serving_of(main, Overlay(main).apply(frames(posted("a2", tenant="a"))))
    for serving in (serving_of(main), fresh):
        for filters in ((Equal("nowhere", "a"),), NOTHING):
            assert not serving.allowed(serving.fix(filters)).any()
            assert serving.documents(serving.fix(filters)) == 0
            assert "it has none" in refusal(serving, serving.fix(filters), Equal("level", "x"))


def test_a_key_sees_nothing_if_its_field_may_lack_a_column(tmp_path: Path) -> None:
    filler = {f"f{number:03}": "x" for number in range(MAX_FIELDS - 1)}
    entries = [
        Entry("a1", "文", "", {"tenant": "a"} | filler),
        Entry("a2", "文", "", {"tenant": "a", "private": True}),
    ]
    write_snapshot(tmp_path / "v1", entries)
    serving = serving_of(Snapshot.open(tmp_path / "v1"))
    public = (*A, Not(Equal("private", True)))
    assert serving.documents(serving.fix(public)) == 0, "a2 has no column private, so it looks like a1"
    assert serving.documents(serving.fix(A)) == 2


def test_restricting_a_filter_that_matches_nothing_does_not_change_it() -> None:
    assert restrict(NOTHING, lambda field: pytest.fail(f"{field!r} was looked at")) == NOTHING
    assert fields_of((Equal("a", 1), Not(Range("b", lt=1)), *NOTHING)) == {"a", "b"}
    assert restrict((AnyOf("a", (1,)),), lambda field: False) == (AnyOf("a", ()),)

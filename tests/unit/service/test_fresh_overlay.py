"""Fresh documents over a snapshot rank as if the index had been built with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexer.errors import BadFilter
from indexer.store.filters import NUMBER, AnyOf, Either, Equal, Filter, Not, Range
from indexer.store.fresh_log import Change, Deleted, Frame, Posted
from indexer.store.manifest import Corrected
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot
from models.correction import Correction
from models.fusion import LATER_DENSE, Fusion, Mode
from service.engine.device import Cpu, searched_by
from service.engine.jobs import Options, SearchJob
from service.engine.local import InProcessEngine
from service.serving.serving import Selection, Serving, count_facets
from tests.unit.indexer.support import DIM, Entry, unit_vectors, write_snapshot

WORDS = ["高血压", "糖尿病", "阿司匹林", "血常规", "发热", "骨折", "哮喘", "aspirin"]
QUERY = "高血压 aspirin 骨折"
# Documents of the snapshot, and how many of them the changes may affect.
MAIN, MET = 30, 20


def document(name: str, seed: int) -> Posted:
    draw = random.Random(seed)
    text = " ".join(draw.choices(WORDS, k=12))
    metadata = {
        "kind": draw.choice(["drug", "disease"]),
        "year": draw.randint(2000, 2005),
        "tags": draw.sample("abc", 2),
    }
    spans = [(0, 20), (15, len(text))] if draw.random() < 0.5 else [(0, len(text))]
    return Posted(name, f"题 {name}", text, metadata, spans, "fp", unit_vectors(len(spans), seed=seed))


def frames(*changes: Change, first: int = 1) -> list[Frame]:
    return [Frame(number, number * 7, [change]) for number, change in enumerate(changes, first)]


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Documents m0 … m29, each one passage."""
    folder: Path = tmp_path_factory.mktemp("overlay") / "v1"
    made = [document(f"m{number}", number) for number in range(MAIN)]
    write_snapshot(folder, [Entry(each.id, each.text, each.title, each.metadata) for each in made])
    return Snapshot.open(folder)


def serving_of(snapshot: Snapshot, overlay: Overlay | None = None) -> Serving:
    def select(filters: tuple[Filter, ...]) -> Selection:
        return Selection(filters, lambda: snapshot.metadata.select(filters)[snapshot.passages.documents])

    return Serving(snapshot, None, snapshot.metadata.facets(), select, overlay or Overlay(snapshot))  # type: ignore[arg-type]


def search(serving: Serving, mode: Mode, *filters: Filter, top_k: int = 10) -> list[tuple[str, float]]:
    options = Options(mode, top_k, filters, Fusion.SCORES, 0.5)
    vector = unit_vectors(1, seed=99)[0].astype(np.float32).tobytes()
    (outcome,) = InProcessEngine(searched_by(Cpu(threads=1))).run(serving, [SearchJob(QUERY, options, vector=vector)])
    found = zip(outcome.found.documents.tolist(), outcome.found.scores.tolist(), strict=True)
    return [(serving.overlay.document(row).id, score) for row, score in found]


def changes(count: int) -> list[Change]:
    """Returns posts, replacements and deletions of documents of the snapshot and of others."""
    draw = random.Random(5)
    made: list[Change] = []
    for number in range(count):
        name = draw.choice([f"m{draw.randrange(MAIN)}", f"f{draw.randrange(30)}"])
        made.append(Deleted(name) if draw.random() < 0.25 else document(name, 100 + number))
    return made


@pytest.fixture(scope="module")
def overlaid(main: Snapshot) -> tuple[Overlay, dict[str, Posted | None]]:
    """Returns the overlay after 120 single changes, and the expected documents: None for deleted ones."""
    overlay = Overlay(main)
    expected: dict[str, Posted | None] = {}
    for frame in frames(*changes(120)):
        overlay = overlay.apply([frame])
        for change in frame.changes:
            expected[change.id] = change if isinstance(change, Posted) else None
    return overlay, expected


def test_every_document_is_as_last_changed(main: Snapshot, overlaid: tuple[Overlay, dict[str, Posted | None]]) -> None:
    overlay, expected = overlaid
    live = {f"m{number}" for number in range(MAIN)} | set(expected)
    live -= {name for name, change in expected.items() if change is None}
    assert overlay.documents == len(live)
    for name, change in expected.items():
        row = overlay.row_of(name)
        if change is None:
            assert row is None
        else:
            assert row is not None
            assert (overlay.document(row).text, overlay.document(row).metadata) == (change.text, change.metadata)
    untouched = next(name for name in live if name not in expected)
    assert overlay.row_of(untouched) == main.documents.row_of(untouched)
    assert overlay.row_of("never heard of") is None


def test_changes_at_once_equal_changes_one_by_one(
    main: Snapshot, overlaid: tuple[Overlay, dict[str, Posted | None]]
) -> None:
    at_once = Overlay(main).apply(frames(*changes(120)))
    assert (at_once.state, at_once.changes) == (overlaid[0].state, overlaid[0].changes)
    assert at_once.passages == overlaid[0].passages
    for mode in Mode:
        assert search(serving_of(main, at_once), mode) == search(serving_of(main, overlaid[0]), mode)


def test_blocks_stay_few_for_many_documents(overlaid: tuple[Overlay, dict[str, Posted | None]]) -> None:
    assert 1 <= len(overlaid[0].blocks) <= 6


def brute(
    main: Snapshot, expected: dict[str, Posted | None], accepts: Callable[[dict], bool]
) -> list[tuple[str, float]]:
    """Computes cosines of every visible document's best passage, best first; later passages count less."""
    query = unit_vectors(1, seed=99)[0].astype(np.float32)
    scores = {}
    for row in range(MAIN):
        stored = main.documents.get(row)
        if stored.id not in expected and accepts(stored.metadata):
            scores[stored.id] = float(main.vectors.values[row].astype(np.float32) @ query)
    for name, change in expected.items():
        if change is not None and accepts(dict(change.metadata)):
            products = change.vectors.astype(np.float32) @ query
            products[1:] = np.minimum(products[1:], LATER_DENSE * products[1:])
            scores[name] = float(products.max())
    return sorted(scores.items(), key=lambda pair: -pair[1])


@pytest.mark.parametrize(
    ("filters", "accepts"),
    [
        ((), lambda metadata: True),
        ((Equal("kind", "drug"),), lambda metadata: metadata["kind"] == "drug"),
        ((Range("year", gte=2002, lt=2005),), lambda metadata: 2002 <= metadata["year"] < 2005),
        ((AnyOf("tags", ("a", "zz")), Equal("kind", "disease")), lambda m: "a" in m["tags"] and m["kind"] == "disease"),
        ((Not(Equal("kind", "drug")),), lambda metadata: metadata["kind"] != "drug"),
        (
            (Either((Equal("tags", "a"), Not(Range("year", gte=2002)))),),
            lambda metadata: "a" in metadata["tags"] or metadata["year"] < 2002,
        ),
    ],
)
@pytest.mark.parametrize("top_k", [1, 5, 100])
def test_dense_search_is_exact_with_every_filter(
    main: Snapshot,
    overlaid: tuple[Overlay, dict[str, Posted | None]],
    filters: tuple[Filter, ...],
    accepts: Callable[[dict], bool],
    top_k: int,
) -> None:
    overlay, expected = overlaid
    found = search(serving_of(main, overlay), Mode.DENSE, *filters, top_k=top_k)
    wanted = brute(main, expected, accepts)[:top_k]
    assert [name for name, _ in found] == [name for name, _ in wanted]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in wanted], atol=2e-3)


def test_words_of_a_posted_document_are_counted_over_all_its_passages(main: Snapshot) -> None:
    text = "偏头痛发作时怕光。" + "布洛芬可以止痛。"
    vectors = unit_vectors(2, seed=5)
    long = Posted("long", "", text, {}, ((0, 9), (9, 17)), "fp", vectors)
    short = replace(long, id="short", spans=((0, 17),), vectors=vectors[:1])
    overlay = Overlay(main).apply(frames(long, short))
    scores = overlay.score_words("偏头痛 布洛芬")
    assert scores[0] == scores[2] > 0
    assert scores[1] == 0


@pytest.mark.parametrize("mode", [Mode.LEXICAL, Mode.HYBRID])
def test_a_document_posted_unchanged_keeps_its_rank(main: Snapshot, mode: Mode) -> None:
    same: list[Change] = []
    for name in ("m3", "m7", "m11"):
        row = main.documents.row_of(name)
        assert row is not None
        stored = main.documents.get(row)
        vectors = main.vectors.values[row : row + 1]
        spans = [(0, len(stored.text))]
        same.append(Posted(name, stored.title, stored.text, stored.metadata, spans, "fp", vectors))
    before, after = (
        search(serving_of(main), mode),
        search(serving_of(main, Overlay(main).apply(frames(*same))), mode),
    )
    assert sorted(name for name, _ in after) == sorted(name for name, _ in before)
    np.testing.assert_allclose([score for _, score in after], [score for _, score in before], atol=2e-3)


def test_fields_of_fresh_documents_can_be_filtered_at_once(main: Snapshot) -> None:
    new = document("n", 1)
    made = Posted("n", new.title, new.text, {"region": "华北"}, new.spans, "fp", new.vectors)
    serving = serving_of(main, Overlay(main).apply(frames(made, document("o", 2))))
    for mode in Mode:
        assert [name for name, _ in search(serving, mode, Equal("region", "华北"))] == ["n"]
        assert search(serving, mode, Equal("region", "华北"), Equal("kind", "drug")) == []
        kind = str(document("o", 2).metadata["kind"])
        assert "n" not in {name for name, _ in search(serving, mode, Not(Equal("region", "华北")), top_k=100)}
        assert "o" in {name for name, _ in search(serving, mode, Not(Equal("region", "华北")), top_k=100)}
        either = {
            name for name, _ in search(serving, mode, Either((Equal("region", "华北"), Equal("kind", kind))), top_k=100)
        }
        assert either == {"n"} | {name for name, _ in search(serving, mode, Equal("kind", kind), top_k=100)}
    with pytest.raises(BadFilter, match="no such field"):
        serving.allowed((Equal("nobody has it", 1),))
    with pytest.raises(BadFilter, match="not a text"):
        serving.allowed((Equal("region", 7),))
    assert serving_of(main, Overlay(main)).allowed(()).all()


def test_a_field_with_values_of_two_kinds_does_not_break_filters(main: Snapshot) -> None:
    """A rollback may put posts over a version whose field has another kind: the snapshot's kind counts."""
    base = document("n", 1)
    old, new = replace(base, metadata={"year": "heute", "dose": 5}), replace(base, id="o", metadata={"dose": "five"})
    serving = serving_of(main, Overlay(main).apply(frames(old)).apply(frames(new, first=2)))
    assert serving.overlay.kinds | {"year": NUMBER, "dose": NUMBER} == serving.overlay.kinds
    for mode in Mode:
        assert "n" not in [name for name, _ in search(serving, mode, Range("year", gte=2000), top_k=100)]
        assert [name for name, _ in search(serving, mode, Equal("dose", 5))] == ["n"]
    facets = count_facets(serving)
    assert "year" not in facets
    assert "dose" not in facets


def test_facets_count_visible_documents(main: Snapshot, overlaid: tuple[Overlay, dict[str, Posted | None]]) -> None:
    overlay, expected = overlaid
    kinds = [main.documents.get(row).metadata["kind"] for row in range(MAIN) if f"m{row}" not in expected]
    kinds += [change.metadata["kind"] for change in expected.values() if change is not None]
    facets = count_facets(serving_of(main, overlay))
    assert facets["kind"] == {
        kind: kinds.count(kind) for kind in sorted(set(kinds), key=lambda k: (-kinds.count(k), k))
    }
    assert "year" not in facets


def test_all_documents_may_be_deleted(main: Snapshot) -> None:
    overlay = Overlay(main).apply(frames(*(Deleted(f"m{number}") for number in range(MAIN))))
    assert (overlay.documents, overlay.passages) == (0, 0)
    for mode in Mode:
        assert search(serving_of(main, overlay), mode) == []


def test_states_differ_if_the_log_differs(main: Snapshot) -> None:
    empty = Overlay(main)
    states = {
        empty.apply(frames(Deleted("m1"))).state,
        empty.apply([Frame(1, 8, [Deleted("m1")])]).state,
        empty.apply(frames(Deleted("m1"), Deleted("m2"))).state,
        empty.state,
    }
    assert len(states) == 4
    assert main.manifest.dim == DIM


def test_only_vectors_of_the_encoders_that_the_snapshot_names_are_corrected(main: Snapshot) -> None:
    named = Corrected(encoders=("reads queries",), passages=9)
    correction = Correction(0.5 * np.eye(DIM, dtype=np.float32), np.full(DIM, 0.25, np.float32))
    manifest = main.manifest.model_copy(update={"correction": named})
    corrected = replace(main, manifest=manifest)
    corrected.__dict__["correction"] = correction  # as if it had been fitted
    posted = [replace(document(f"f{seed}", seed), encoder=by) for seed, by in enumerate(["reads queries", "fp"])]
    plain, overlaid = (Overlay(each).apply(frames(*posted)) for each in (main, corrected))
    queries = unit_vectors(3, seed=7).astype(np.float32)
    before, after = plain.score_vectors(queries), overlaid.score_vectors(queries)
    passages = len(posted[0].spans)
    moved = 0.5 * before[:, :passages] + queries.sum(axis=1, keepdims=True) * 0.25
    np.testing.assert_allclose(after[:, :passages], moved, atol=1e-3)
    np.testing.assert_array_equal(after[:, passages:], before[:, passages:])
    # A block that is merged later was corrected once, when it came.
    more = overlaid.apply(frames(*(document(f"g{seed}", seed) for seed in range(2, 5)), first=3))
    assert len(more.blocks) < 3
    np.testing.assert_allclose(more.score_vectors(queries)[:, :passages], moved, atol=1e-3)

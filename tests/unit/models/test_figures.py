"""Figures of docs/benchmarks.md: read from its tables, drawn, and not older than them."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from models.bench.figures import METRIC, SIZES, SPEED, main, sizes, table
from models.errors import BadData

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
LARGEST_BYTES = 30_000


def texts(picture: Path) -> set[str]:
    return {element.text or "" for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")}


def test_a_table_is_read_by_its_columns() -> None:
    page = "# One\n|a|\n|-|\n|0|\n### Figure 1: it\nwords\n\n| a | b |\n|---|---:|\n| **x** | 1 (0–2) |\n\n| c |\n"
    assert table(page, SPEED) == [{"a": "x", "b": "1 (0–2)"}]


def test_a_heading_without_a_table_is_refused() -> None:
    with pytest.raises(BadData, match="no table"):
        table("### Figure 1\nwords\n### Next\n| a |\n|---|\n| 1 |\n", SPEED)


def test_a_short_row_and_an_unknown_kind_are_named() -> None:
    with pytest.raises(BadData, match="### Figure 1: the row of 'x' has 1 cells, the table 2 columns"):
        table("### Figure 1\n| a | b |\n|---|---|\n| x |\n", SPEED)
    with pytest.raises(BadData, match="### Figure 4: no kind is called 'new'; there are one encoder, pair"):
        sizes([{"kind": "new", "documents": "d", "queries": "q", METRIC: "1", "million parameters": "1"}])


def test_both_pictures_show_every_row(tmp_path: Path) -> None:
    assert main([str(DOCS / "benchmarks.md"), str(tmp_path / "new")]) == 0
    for folder in (tmp_path / "new", DOCS / "figures"):
        assert {row["system"] for row in table(PAGE, SPEED)} <= texts(folder / "speed.svg")
        rows = table(PAGE, SIZES)
        assert {row[name] for row in rows for name in ("queries", METRIC)} <= texts(folder / "sizes.svg")


@pytest.mark.parametrize("name", ["speed", "sizes"])
def test_pictures_are_small_and_shown_by_the_page(name: str) -> None:
    assert (DOCS / "figures" / f"{name}.svg").stat().st_size < LARGEST_BYTES
    assert f"](figures/{name}.svg)" in PAGE

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from models.evaluation import studies
from models.evaluation.report import drawing as theme
from models.evaluation.report.page import write
from models.evaluation.report.pictures import _front, _speeds, draw
from models.evaluation.results import Curve
from models.evaluation.significance import compare
from tests.support.runs import full_run, make_run, set_result

PICTURES = ["speed", "sets", "dimensions", "indexes", "similarities"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = full_run()
    return write(run, tmp_path_factory.mktemp("report"), compare(run, "BM25"))


@pytest.fixture(scope="module")
def pictures() -> dict[str, Figure]:
    return {picture.name: picture.figure for picture in draw(full_run())}


class Names(HTMLParser):
    """Collects ids, and the targets of links and references."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.append(values["id"])
        self.targets += [values[name] for name in ("href", "xlink:href", "src") if name in values]


def test_every_picture_is_in_the_page_and_beside_it_in_both_formats(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"<figure class='card' id='(\w+)'", text) == PICTURES
    assert text.count("<svg ") == len(PICTURES)
    for name in PICTURES:
        assert (page.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(page.parent / "figures" / f"{name}.svg").getroot().tag.endswith("svg")


def test_the_page_refers_only_to_its_own_files_and_ids_are_unique(page: Path) -> None:
    names = Names()
    names.feed(page.read_text(encoding="utf-8"))
    assert len(names.ids) == len(set(names.ids))
    inner = {target[1:] for target in names.targets if target.startswith("#")}
    assert inner <= set(names.ids)
    files = {target for target in names.targets if not target.startswith(("#", "data:"))}
    assert files == {f"figures/{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    assert all((page.parent / file).is_file() for file in files)


def test_pictures_take_their_colours_from_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    drawings = text[text.index("<svg") : text.rindex("</svg>")]
    used = set(re.findall(r"#[0-9a-f]{6}\b", drawings))
    assert used == set()
    for variable in set(re.findall(r"var\(--([\w-]+)\)", drawings)):
        assert f"--{variable}: #" in text


def test_the_page_shows_measurements_methods_and_gaps(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<b>100.00</b>" not in text
    assert "<span class='mark up'>↑</span>" in text
    assert "care eval data --baseline BM25" in text
    assert "2 cores, x86_64 · 2026-01-02T03:04:05Z · 12 s" in text
    assert "<dt>MedicalRetrieval</dt><dd>put it into data/MedicalRetrieval</dd>" in text
    assert "paired bootstrap" in text
    assert "MRR@10" in text


def test_names_are_escaped(tmp_path: Path) -> None:
    run = make_run([set_result("<script>alert(1)</script>", [0.5] * 20, "a'b\"c & $d$", "<b>", 10.0)])
    text = write(run, tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<h2>&lt;b&gt;</h2>" in text


def test_a_run_without_speeds_and_studies_has_fewer_pictures() -> None:
    assert [picture.name for picture in draw(make_run([set_result("a", [0.5])]))] == ["sets"]


def test_many_systems_and_names_without_glyphs_are_drawn() -> None:
    names = [f"system {number} \U000e0041" for number in range(9)]
    run = make_run([set_result(name, [0.5], "试题", "b", 10.0 + place) for place, name in enumerate(names)])
    assert [picture.name for picture in draw(run)] == ["speed", "sets"]
    assert theme.drawable("ab\U000e0041") == "ab□"


def test_a_system_has_one_colour_in_all_pictures(pictures: dict[str, Figure]) -> None:
    points = {line.get_color() for line in pictures["speed"].axes[0].lines if line.get_marker() == "D"}
    lines = {line.get_color() for line in pictures["dimensions"].axes[0].lines if line.get_marker() == "D"}
    assert points == lines == {theme.SERIES[2]}


def test_pictures_show_the_values_of_the_run(pictures: dict[str, Figure]) -> None:
    run = full_run()
    bars = [bar.get_width() for bar in pictures["sets"].axes[0].patches]
    assert bars == [result.value for result in run.results]
    drawn = [list(zip(*line.get_data(), strict=True)) for line in pictures["dimensions"].axes[0].lines]
    wanted = [curve.points for curve in run.curves if curve.study == studies.DIMENSIONS and curve.set_name == "one"]
    assert drawn == wanted


def test_speed_is_compared_over_the_same_sets() -> None:
    results = [
        set_result("both", [0.4], "one", queries_per_second=100.0),
        set_result("both", [0.6], "two", queries_per_second=50.0),
        set_result("half", [0.9], "one", queries_per_second=100.0),
    ]
    points = _speeds(results)
    assert list(points) == ["both"]
    assert points["both"] == pytest.approx((2 / (1 / 100 + 1 / 50), 50.0))


def test_the_pareto_front_has_systems_that_no_other_beats_in_both() -> None:
    assert _front([(1, 9), (2, 5), (3, 7), (4, 1)]) == [(1, 9), (3, 7), (4, 1)]


def test_labels_do_not_cover_each_other_and_a_legend_names_the_rest() -> None:
    names = [f"a system of some length {number}" for number in range(9)]
    run = make_run([set_result(name, [0.5], queries_per_second=100.0 + n) for n, name in enumerate(names)])
    [speed, _] = draw(run)
    [axes] = speed.figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(not a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
    legend = axes.get_legend()
    assert legend is not None
    assert sorted(text.get_text() for text in (*axes.texts, *legend.get_texts())) == names


def test_a_run_with_only_curves_is_drawn() -> None:
    curve = Curve(studies.SIMILARITIES, "one", "dense", studies.POSITIVES, "cosine", "share", [(0.5, 100.0)])
    assert [picture.name for picture in draw(replace(make_run([]), curves=[curve]))] == ["similarities"]

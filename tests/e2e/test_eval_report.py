"""The report of an evaluation, opened from disk in a browser: all figures are drawn and nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from models.evaluation.report.page import write
from models.evaluation.significance import compare
from tests.support.runs import full_run

WIDE, PHONE = 1280, 390
# Every drawn shape of each figure that has a size and the colour of a system, an index or a kind of document.
MARKS = """
const style = getComputedStyle(document.documentElement);
const probe = document.body.appendChild(document.createElement("i"));
const colours = new Set([1, 2, 3, 4, 5, 6, 7].map((number) => {
  probe.style.color = style.getPropertyValue(`--series-${number}`);
  return getComputedStyle(probe).color;
}));
probe.remove();
return [...document.querySelectorAll("figure")].map((figure) => {
  const svg = figure.querySelector("svg");
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("path, use")].filter((mark) => {
    const { width, height } = mark.getBoundingClientRect();
    const { fill, stroke } = getComputedStyle(mark);
    return width + height > 0 && (colours.has(fill) || colours.has(stroke));
  });
  const texts = [...svg.querySelectorAll("text")].filter((text) => text.getBoundingClientRect().width > 0);
  return { id: figure.id, width: box.width, height: box.height, marks: marks.length, texts: texts.length };
});
"""
# Expected shapes in each figure and in its legend: points; bars; lines with points; areas.
EXPECTED_MARKS = {
    "speed": 3,
    "sets": 7 + 3,
    "dimensions": 4 * (1 + 3) + 4,
    "indexes": 4 * (2 + 5) + 6,
    "similarities": 24 + 3,
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = full_run()
    return write(run, tmp_path_factory.mktemp("report"), compare(run, "BM25"))


@pytest.fixture
def browser(chrome: Chrome) -> Iterator[Chrome]:
    """Yields the browser; it must log no errors, and its colour scheme is reset to light."""
    chrome.get_log("browser")  # type: ignore[no-untyped-call]
    yield chrome
    entries = chrome.get_log("browser")  # type: ignore[no-untyped-call]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert [entry["message"] for entry in entries if entry["level"] == "SEVERE"] == []


def open_page(chrome: Chrome, page: Path, width: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    chrome.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_every_picture_is_drawn(browser: Chrome, page: Path, width: int, scheme: str) -> None:
    open_page(browser, page, width, scheme)
    found: list[dict[str, Any]] = browser.execute_script(MARKS)
    assert [picture["id"] for picture in found] == list(EXPECTED_MARKS)
    for picture in found:
        assert picture["width"] > 250
        assert picture["height"] > 100
        assert picture["marks"] == EXPECTED_MARKS[picture["id"]]
        assert picture["texts"] >= 3


def test_the_page_fetches_nothing(browser: Chrome, page: Path) -> None:
    open_page(browser, page, WIDE)
    assert browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


def test_a_phone_scrolls_tables_but_not_the_page(browser: Chrome, page: Path) -> None:
    open_page(browser, page, PHONE)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE


def test_pictures_follow_the_readers_colour_scheme(browser: Chrome, page: Path) -> None:
    colours = []
    for scheme in ("light", "dark"):
        open_page(browser, page, WIDE, scheme)
        colours.append(
            browser.execute_script("return getComputedStyle(document.querySelector('figure svg text')).fill")
        )
    assert colours[0] != colours[1]


@pytest.mark.parametrize("name", EXPECTED_MARKS)
def test_the_files_beside_the_page_open(browser: Chrome, page: Path, name: str) -> None:
    open_page(browser, page, WIDE)
    links = browser.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} a`)].map((link) => link.href)", name
    )
    assert len(links) == 2
    browser.get(links[0])
    assert browser.execute_script("return document.images[0].naturalWidth") > 900
    browser.get(links[1])
    assert browser.execute_script("return document.documentElement.getBBox().width") > 300

"""The search page over a custom corpus: its texts, titles and numbers, and queries in the address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from indexer.build import build
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from tests.e2e.browser import Page
from tests.e2e.server import ENCODER, Server

SERIAL = 110101199001011235
ROWS: list[dict[str, Any]] = [
    {
        "_id": f"3f2a9c{number:02d}",
        "title": "" if number % 2 else f"工单 {number}",
        "text": f"第 {number} 号水泵的密封件已更换，轴承温度和振动记录在案。",
        "metadata": {"price": 0.1 + 0.2 * number, "year": 2000 + number, "serial": SERIAL + number, "tags": []},
    }
    for number in range(8)
]


def serve(folder: Path, rows: list[dict[str, Any]]) -> Iterator[Server]:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    collection = Collection(folder / "collection")
    collection.publish(build([corpus], OnnxEncoder.load(ENCODER), collection).version)
    server = Server(collection.root)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("own"), ROWS)


@pytest.fixture
def own(chrome: Chrome, own_server: Server) -> Iterator[Page]:
    page = Page(chrome, own_server.url)
    yield page
    complaints = page.console_errors()
    chrome.execute_script("localStorage.clear()")
    assert complaints == []


def test_a_custom_corpus_offers_its_titles_and_no_disclaimer(own: Page) -> None:
    own.open()
    own.until(lambda: own.all("#examples button"))
    assert own.texts("#examples button") == ["工单 0", "工单 2", "工单 4", "工单 6"]
    shown = own.text("body")
    for word in ("医", "血压", "演示", "拨打"):  # not "120": the time in a snapshot's name may hold it
        assert word not in shown
    own.press("#examples button")
    own.until_answered()
    assert own.texts(".title")[0] == "工单 0"


def test_the_texts_of_a_collection_follow_the_language(page: Page) -> None:
    page.open()
    page.until(lambda: page.text(".hero h1") == "医学知识演示")
    assert page.chrome.title == "医学知识演示"
    assert "不构成医疗建议" in page.text("footer")
    page.press("#language")
    assert page.text(".hero h1") == page.chrome.title == "Medical knowledge, a demonstration"
    assert "ringing in the ears" in page.texts("#examples button")
    page.press("#language")


def test_the_box_has_focus_on_the_start_page_only(own: Page) -> None:
    own.open()
    own.until(lambda: own.run("return document.activeElement.id") == "query")
    own.open_query("水泵")
    assert own.run("return document.activeElement.id") != "query"


def test_a_query_in_the_address_is_searched_on_load(own: Page) -> None:
    own.open("?q=%E6%B0%B4%E6%B3%B5&mode=lexical&top_k=5")
    own.until_answered()
    assert own.one("#query").get_attribute("value") == "水泵"
    assert (own.asked()[0]["query"], own.asked()[0]["mode"], own.asked()[0]["top_k"]) == ("水泵", "lexical", 5)
    assert "?" not in own.chrome.current_url
    assert "#q=" in own.chrome.current_url
    first = own.chrome.current_url
    own.search("轴承")
    assert own.chrome.current_url != first
    own.chrome.back()
    own.until(lambda: own.one("#query").get_attribute("value") == "水泵" and own.ids())
    assert own.chrome.current_url == first


def test_untitled_documents_show_the_beginning_of_their_text(own: Page) -> None:
    own.open_query("水泵", "&mode=dense")
    titles = dict(zip(own.ids(), own.texts(".title"), strict=True))
    assert titles["3f2a9c01"] == ROWS[1]["text"]
    assert titles["3f2a9c02"] == "工单 2"


def test_numbers_are_rounded_and_whole_numbers_keep_their_digits(own: Page) -> None:
    own.open_query("水泵", "&mode=dense")
    tags = dict(zip(own.ids(), own.texts(".tags"), strict=True))
    # The price is stored as 0.30000000000000004; an empty list is not shown.
    assert tags["3f2a9c01"] == f"price0.3year2001serial{SERIAL + 1}"


def test_a_field_of_numbers_has_bounds(own: Page) -> None:
    own.open_query("水泵", "&mode=dense")
    own.until(lambda: own.all("[data-range=year] input"))
    low, high = own.all("[data-range=year] input")
    assert (low.get_attribute("placeholder"), high.get_attribute("placeholder")) == ("2000", "2007")
    own.run("arguments[0].value = '2003'; arguments[0].dispatchEvent(new Event('change'))", low)
    own.until(lambda: len(own.ids()) == 5)
    assert own.asked()[-1]["filters"] == [{"field": "year", "gte": 2003}]
    own.run("arguments[0].value = '2004'; arguments[0].dispatchEvent(new Event('change'))", high)
    own.until(lambda: sorted(own.ids()) == ["3f2a9c03", "3f2a9c04"])
    assert own.texts("#fold-count") == ["1"]
    own.chrome.back()
    own.until(lambda: len(own.ids()) == 5)
    assert own.all("[data-range=year] input")[1].get_attribute("value") == ""


def test_bounds_in_a_shared_address_apply_and_can_be_removed(own: Page) -> None:
    own.open_query("水泵", f"&range=year:2090:&range=serial:{SERIAL}:&range=price:x:")
    serial = {"field": "serial", "gte": str(SERIAL)}
    assert own.asked()[0]["filters"] == [{"field": "year", "gte": 2090}, serial]
    assert own.texts("#none .drop") == ["year：不小于 2090", f"serial：不小于 {SERIAL}"]
    own.press("#none .drop")
    own.until(lambda: len(own.ids()) == 8)


def test_a_collection_without_metadata_reports_that_there_are_no_filters(chrome: Chrome, tmp_path: Path) -> None:
    bare = [{"_id": row["_id"], "title": "只有标题", "text": ""} for row in ROWS[:2]]
    for server in serve(tmp_path, bare):
        page = Page(chrome, server.url)
        chrome.get(f"{server.url}/?q=标题")
        page.until_answered()
        page.until(lambda page=page: page.texts("#panel p") == ["这个集合没有可以筛选的字段。"])
        page.press(".hit .foot button")
        page.until(lambda page=page: page.texts(".hit .full")[0] == "这个条目没有正文。")

"""States of the search page: waiting, no hits, errors, truncated query, history, shared address."""

from __future__ import annotations

from selenium.webdriver.common.keys import Keys

from tests.e2e.browser import Page
from tests.e2e.server import Server

QUERY = "血压高应该吃哪种药"


def test_no_hits_offers_to_drop_each_filter(page: Page) -> None:
    page.open_query(QUERY, "&filter=kind:drug&from=2099-01-01")
    assert page.ids() == []
    assert page.texts("#none .drop") == ["类别：药物", "更新日期：2099-01-01 起"]
    page.press("#none .drop:last-child")
    page.until(page.ids)
    assert page.asked()[-1]["filters"] == [{"field": "kind", "in": ["drug"]}]
    assert page.run("return document.activeElement.id") == "answer"


def test_a_lexical_search_without_hits_offers_dense_search(page: Page) -> None:
    page.open_query("qwxzzk", "&mode=lexical")
    assert page.ids() == []
    page.press("#none .chip")
    page.until(page.ids)
    assert page.asked()[-1]["mode"] == "dense"


def test_a_truncated_query_is_reported(page: Page) -> None:
    page.open_query("头痛")
    assert not page.one("#notice").is_displayed()
    page.search("反复头痛伴恶心" * 120)
    assert page.one("#notice").is_displayed()


def test_a_refused_request_shows_the_message_and_the_request_id(page: Page) -> None:
    page.open_query(QUERY, "&filter=colour:red")
    assert "colour" in page.text("#trouble")
    assert page.text("#trouble code")
    assert page.one("#trouble button").is_displayed()
    assert any("422" in complaint for complaint in page.console_errors())


def test_retry_works_once_the_service_is_back(page: Page, server: Server) -> None:
    page.open_query(QUERY)
    before = page.ids()
    server.stop()
    try:
        page.search("头痛")
        assert "连不上" in page.text("#trouble")
        assert page.ids() == []
        page.press("#language")
        assert "cannot be reached" in page.text("#trouble")
        assert page.text("#summary") == ""
    finally:
        server.start()
    assert any("ERR_CONNECTION_REFUSED" in complaint for complaint in page.console_errors())
    page.press("#trouble button")
    page.until(page.ids)
    assert page.ids() != before
    assert page.text("#trouble") == ""


def test_a_late_answer_never_replaces_a_newer_one(page: Page) -> None:
    page.open_query(QUERY)
    page.run("hold()")
    page.one("#query").send_keys(Keys.CONTROL, "a")
    page.one("#query").send_keys("头痛", Keys.ENTER)
    page.until(lambda: len(page.asked()) == 2)
    page.run("letPass()")
    page.search("骨折")
    newer = page.ids()
    page.run_async("release(); await new Promise((resolve) => setTimeout(resolve, 100))")
    assert page.ids() == newer
    assert page.one("#query").get_attribute("value") == "骨折"


def test_old_hits_stay_visible_while_waiting(page: Page) -> None:
    page.open_query(QUERY)
    before = page.ids()
    page.run("hold()")
    page.press("#modes label:has([value=dense])")
    page.until(lambda: page.all("#answer[aria-busy]"))
    assert page.ids() == before
    page.run("release()")
    page.until_answered()


def test_the_first_search_shows_placeholders_while_waiting(page: Page) -> None:
    page.open()
    page.run("hold()")
    page.press("#examples button")
    page.until(lambda: page.all(".skeleton"))
    assert page.text("#summary") == "正在检索"
    page.run("release()")
    page.until_answered()
    assert len(page.ids()) == 10


def test_back_and_forward_restore_query_and_hits(page: Page) -> None:
    page.open()
    page.search("头痛")
    first = page.ids()
    page.press("#panel label:has([value=drug])")
    page.until(lambda: page.ids() != first)
    filtered = page.ids()
    page.chrome.back()
    page.until(lambda: page.ids() == first)
    assert not page.all("#panel input:checked")
    page.chrome.back()
    page.until(lambda: page.one("#examples").is_displayed())
    assert page.one("#query").get_attribute("value") == ""
    page.chrome.forward()
    page.chrome.forward()
    page.until(lambda: page.ids() == filtered)
    assert page.one("#panel [value=drug]").is_selected()


def test_a_shared_address_gives_the_same_search(page: Page) -> None:
    page.open_query(QUERY, "&mode=dense&top_k=5&filter=kind:drug&to=2025-12-31")
    assert page.asked()[0] == {
        "query": QUERY,
        "mode": "dense",
        "top_k": 5,
        "fields": ["headline", "snippet", "metadata"],
        "filters": [{"field": "kind", "in": ["drug"]}, {"field": "updated", "lt": "2026-01-01"}],
    }
    assert page.one("#modes [value=dense]").is_selected()
    assert page.one("#panel [value=drug]").is_selected()
    assert page.one("#panel [name=to]").get_attribute("value") == "2025-12-31"
    assert page.one("#top-k").get_attribute("value") == "5"
    assert page.chrome.title.startswith(QUERY)


def test_an_address_keeps_filters_with_colons(page: Page) -> None:
    filters = {"dc:type": ["a", "b:c"], "kind": ["a:b", ":", "%3A"], "%3A%25": ["%"]}
    page.open()
    read = page.run_async(
        "const { readAddress, writeAddress } = await import('/static/address.js');"
        "return readAddress(writeAddress({ ...readAddress(''), query: 'a', filters: arguments[0] })).filters",
        filters,
    )
    assert read == filters


def test_the_query_is_never_sent_in_a_url(page: Page) -> None:
    page.open_query(QUERY)
    sent = page.run("return performance.getEntries().map((entry) => new URL(entry.name, location).search)")
    assert set(sent) == {""}


def test_invalid_values_in_the_address_become_defaults(page: Page) -> None:
    page.open_query(QUERY, "&mode=magic&top_k=-3&from=yesterday&filter=:")
    assert (page.asked()[0]["mode"], page.asked()[0]["top_k"], page.asked()[0]["filters"]) == ("hybrid", 10, [])

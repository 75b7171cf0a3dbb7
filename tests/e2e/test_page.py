"""The search page: what it shows and offers, in a real browser against the real service."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.e2e.browser import Page

QUERY = "血压高应该吃哪种药"
PHONE = (360, 740)


def test_an_example_leads_to_ranked_hits(page: Page) -> None:
    page.open()
    assert not page.one("#answer").is_displayed()
    assert "400" in page.text("#facts")
    example = page.one("#examples button")
    question = example.text
    example.click()
    page.until_answered()
    assert page.one("#query").get_attribute("value") == question
    assert page.texts(".rank") == [str(place) for place in range(1, 11)]
    scores = [float(score) for score in page.texts(".score data")]
    assert scores == sorted(scores, reverse=True)
    assert all(page.texts(".title"))
    assert all(page.texts(".snippet"))


def test_matching_terms_are_marked(page: Page) -> None:
    page.open_query("高血压", "&mode=lexical")
    assert "高血压" in page.texts(".snippet mark")


def test_marks_are_placed_by_code_points(page: Page) -> None:
    page.open()
    cut = page.run_async(
        "const { pieces } = await import('/static/marks.js');"
        "return pieces(arguments[0], arguments[1]).map((piece) => [piece.text, piece.marked]);",
        "𠮷田😀高血压",
        [[3, 6], [5, 9], [0, 1]],
    )
    assert cut == [["𠮷", True], ["田😀", False], ["高血压", True]]


def test_hits_show_their_metadata(page: Page) -> None:
    page.open_query(QUERY)
    tags = page.texts(".hit:first-child .tags dd")
    assert len(tags) == 4
    assert "中文" in tags


def test_each_stage_shows_its_time(page: Page) -> None:
    page.open_query(QUERY)
    assert {"分词", "排队", "编码", "检索", "取文档"} <= set(page.texts("#timings dt"))
    assert all(float(value) >= 0 for value in page.texts("#timings dd"))
    assert len(page.all(".stages i")) == len(page.all("#timings dt"))
    assert "10 条结果" in page.text("#summary")


def test_the_footer_names_the_snapshot_and_is_no_medical_advice(page: Page) -> None:
    page.open_query(QUERY)
    served = page.run_async("return (await (await fetch('/v1/collection')).json()).snapshot")
    assert served in page.text("#snapshot")
    assert re.findall(r"care-[\w-]+", page.text("#encoders")) == [
        "care-pair-zh-embeddinggemma-300m-bge-small-zh",
        "care-pair-zh",
    ]
    assert "不构成医疗建议" in page.text("footer")


def test_full_text_opens_in_place_of_the_snippet(page: Page) -> None:
    page.open_query("高血压", "&mode=lexical")
    button = page.one(".hit .foot button")
    button.click()
    page.until(lambda: page.one(".hit .full").is_displayed())
    assert button.get_attribute("aria-expanded") == "true"
    assert not page.one(".hit .snippet").is_displayed()
    document = page.run_async(
        "return (await (await fetch('/v1/documents/' + arguments[0])).json()).text", page.ids()[0]
    )
    assert page.texts(".hit .full")[0] == document
    button.click()
    assert page.one(".hit .snippet").is_displayed()


def test_the_mode_goes_into_the_request(page: Page) -> None:
    page.open_query(QUERY)
    for mode in ("dense", "lexical", "hybrid"):
        page.press(f"#modes label:has([value={mode}])")
        page.until_answered()
        assert page.asked()[-1]["mode"] == mode
        assert f"mode={mode}" in page.chrome.current_url


def test_choosing_an_option_also_sends_the_typed_query(page: Page) -> None:
    page.open_query("头痛")
    page.one("#query").send_keys("恶心")
    page.press("#modes label:has([value=dense])")
    page.until_answered()
    assert page.asked()[-1]["query"] == "头痛恶心"


def test_filters_narrow_and_can_be_cleared(page: Page) -> None:
    page.open_query(QUERY)
    page.press("#panel label:has([value=drug])")
    page.press("#panel label:has([value='心血管内科'])")
    page.until_answered()
    hits = page.texts(".hit .tags")
    assert hits
    assert all("药物" in hit and "心血管内科" in hit for hit in hits)
    assert page.texts("#fold-count") == ["2"]
    page.press("#panel > button")
    page.until_answered()
    assert page.asked()[-1]["filters"] == []
    assert not page.all("#panel input:checked")


def test_a_date_range_includes_its_last_day(page: Page) -> None:
    page.open_query(QUERY)
    day = page.run_async(
        "const { results } = await (await fetch('/v1/search?q=' + arguments[0])).json();"
        "return results[0].hits[0].metadata.updated",
        QUERY,
    )
    page.set_day("from", day)
    page.set_day("to", day)
    shown = page.texts(".hit .tags")
    assert shown
    assert all(day in hit for hit in shown)


def test_ranks_of_both_retrievers_are_shown_on_request(page: Page) -> None:
    page.open_query("高血压")
    assert not page.all(".ranks")
    page.press("#explain")
    page.until(lambda: page.all(".ranks"))
    assert page.asked()[-1]["explain"] is True
    assert "explain=1" in page.chrome.current_url
    assert page.texts(".hit:first-child .ranks dt") == ["语义", "关键词", "语义占比"]
    meaning, words, share = page.texts(".hit:first-child .ranks dd")
    assert meaning.startswith("第 ")
    assert words.startswith("第 ")
    assert 0 <= float(share) <= 1
    page.press("#modes label:has([value=dense])")
    page.until(lambda: page.texts(".hit:first-child .ranks dt") == ["语义", "关键词"])
    assert page.texts(".hit:first-child .ranks dd")[1] == "—"


def test_top_k_sets_the_number_of_hits(page: Page) -> None:
    page.open_query(QUERY)
    page.press("#top-k option:first-child")
    page.until(lambda: len(page.ids()) == 5)
    assert page.asked()[-1]["top_k"] == 5


def test_the_language_changes_in_place_and_is_remembered(page: Page) -> None:
    page.open_query(QUERY)
    assert page.run("return document.documentElement.lang") == "zh-CN"
    page.press(".hit .foot button")
    page.until(lambda: page.one(".hit .full").is_displayed())
    page.press("#language")
    assert page.text("#search [type=submit]") == "Search"
    assert "10 results" in page.text("#summary")
    assert page.text(".hit .foot button") == "Hide full text"
    assert page.one(".hit .full").is_displayed()
    assert len(page.asked()) == 1
    page.open_query(QUERY)
    assert page.run("return document.documentElement.lang") == "en"
    page.press("#language")
    assert page.text("#search [type=submit]") == "检索"


def test_both_languages_have_the_same_texts(page: Page) -> None:
    page.open()
    zh, en = page.run_async(
        "const { strings } = await import('/static/strings.js');"
        "return ['zh', 'en'].map((language) =>"
        " Object.entries(strings[language]).map(([key, entry]) => [key, typeof entry, entry.length > 0]));"
    )
    assert [(key, kind) for key, kind, _ in zh] == [(key, kind) for key, kind, _ in en]


@pytest.mark.parametrize("toggles", [0, 1], ids=["zh", "en"])
def test_a_phone_never_scrolls_sideways(page: Page, toggles: int) -> None:
    def fits() -> bool:
        # Not innerWidth: a phone widens it to fit overflowing content.
        return bool(page.run("return document.documentElement.scrollWidth <= arguments[0]", PHONE[0]))

    page.open(size=PHONE)
    for _ in range(toggles):
        page.press("#language")
    assert fits()
    page.open_query(QUERY, size=PHONE)
    assert fits()
    assert not page.one("#panel").is_displayed()
    page.press("#fold")
    assert page.one("#panel").is_displayed()
    assert fits()
    page.open_query(QUERY, "&from=2099-01-01&filter=kind:drug", size=PHONE)
    assert fits()


def test_slash_focuses_the_search_box_and_is_typed_inside_it(page: Page) -> None:
    page.open_query(QUERY)
    page.run("document.activeElement.blur()")
    ActionChains(page.chrome).send_keys("/").perform()
    assert page.run("return document.activeElement.id") == "query"
    ActionChains(page.chrome).send_keys(Keys.END, "/").perform()
    assert page.one("#query").get_attribute("value") == f"{QUERY}/"


def test_an_empty_query_is_not_sent(page: Page) -> None:
    page.open()
    page.one("#query").send_keys("   ", Keys.ENTER)
    page.press("#search [type=submit]")
    assert page.asked() == []
    assert page.run("return document.activeElement.id") == "query"


@pytest.mark.parametrize("address", ["", "#q=%E5%A4%B4%E7%97%9B"], ids=["start", "hits"])
def test_every_control_has_a_name(page: Page, address: str) -> None:
    page.open(address)
    if address:
        page.until_answered()
    controls = [control for control in page.all("a, button, input, select, main, nav, aside") if control.is_displayed()]
    assert controls
    assert [control.get_attribute("outerHTML") for control in controls if not control.accessible_name] == []


def test_the_page_follows_the_colour_scheme(page: Page) -> None:
    papers = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.open()
        papers.append(page.run("return getComputedStyle(document.documentElement).backgroundColor"))
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert papers[0] != papers[1]


def test_data_is_text_and_never_markup(page: Page) -> None:
    page.open_query(QUERY)
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    page.run_async(
        "const { drawHits } = await import('/static/results.js');"
        "drawHits(document.getElementById('hits'), [{ id: arguments[0], title: arguments[0], score: 1,"
        " snippet: arguments[0], highlights: [[0, 4]], metadata: { kind: arguments[0], [arguments[0]]: 1 } }]);",
        evil,
    )
    assert page.texts(".title") == [evil]
    assert page.texts(".snippet") == [evil]
    assert not page.all("#hits img, #hits script")

"""Content security policy of the pages, in a real browser: no inline script or style, no framing."""

from __future__ import annotations

import pytest
from selenium.webdriver import Chrome

from tests.e2e.browser import WAIT_SECONDS, Page
from tests.e2e.server import Server

INJECTED = """
const script = document.createElement("script");
script.textContent = "window.ran = true";
document.head.append(script);
const markup = "<p id='styled' style='color: rgb(1, 2, 3)' onclick='window.ran = true'>x</p>";
document.body.insertAdjacentHTML("beforeend", markup);
const styled = document.getElementById("styled");
styled.click();
return [window.ran === true, getComputedStyle(styled).color === "rgb(1, 2, 3)"];
"""

FRAMED = """
const [path, done] = arguments;
const frame = document.createElement("iframe");
frame.onload = () => done(frame.contentDocument !== null);
frame.src = path;
document.body.append(frame);
"""


@pytest.fixture
def docs(chrome: Chrome, server: Server) -> Page:
    page = Page(chrome, server.url)
    page.console_errors()
    chrome.get(f"{server.url}/docs")
    page.until(lambda: len(page.all(".opblock")) > 10)
    return page


def test_the_page_of_the_api_works_under_its_policy(docs: Page) -> None:
    """The API page shows every route, accepts the token, and sends requests to the service."""
    assert "/v1/search" in docs.text("#swagger-ui")
    docs.one(".auth-wrapper .authorize").click()
    docs.until(lambda: docs.all(".auth-container input"))
    docs.one(".auth-container input").send_keys("a token")
    docs.one(".auth-btn-wrapper .authorize").click()
    docs.one(".auth-btn-wrapper .btn-done").click()
    docs.one("#operations-admin-versions_admin_versions_get button").click()
    docs.until(lambda: docs.all(".try-out__btn"))
    docs.one(".try-out__btn").click()
    docs.until(lambda: docs.all("button.execute"))
    docs.one("button.execute").click()
    docs.until(lambda: docs.all(".live-responses-table"))
    assert "unauthorized" in docs.text(".live-responses-table")  # the token was sent, but it is not the right one
    assert "Bearer a token" in docs.text(".curl-command")
    assert [error for error in docs.console_errors() if "401" not in error] == []


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_no_script_or_style_in_the_markup_takes_effect(chrome: Chrome, server: Server, path: str) -> None:
    page = Page(chrome, server.url)
    chrome.get(server.url + path)
    page.console_errors()
    assert chrome.execute_script(INJECTED) == [False, False]
    assert any("Content Security Policy" in error for error in page.console_errors())


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_no_page_is_shown_in_a_frame(chrome: Chrome, server: Server, path: str) -> None:
    """Tries it from the page's own origin, the only one that could look into the frame.

    A blank page in a frame shows that frames as such work.
    """
    chrome.get(f"{server.url}/livez")
    chrome.set_script_timeout(WAIT_SECONDS)
    assert chrome.execute_async_script(FRAMED, "about:blank") is True
    assert chrome.execute_async_script(FRAMED, path) is False
    Page(chrome, server.url).console_errors()

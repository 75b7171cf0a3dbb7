"""The search page of a service with keys: it asks for a key, keeps it for the tab, and asks again if it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import WebDriverWait

from models.package import BUNDLED_PAIR
from tests.e2e.browser import WAIT_SECONDS, Page
from tests.e2e.server import Server
from tests.support.keys import create


@pytest.fixture
def key(tmp_path: Path) -> str:
    return create(tmp_path / "keys.json", "reader", "--scope", "search")


@pytest.fixture
def guarded(key: str, tmp_path: Path, example_collection: Path) -> Iterator[Server]:
    keys = str(tmp_path / "keys.json")
    server = Server(example_collection, CARE_ENCODER=str(BUNDLED_PAIR), CARE_KEYS_FILE=keys)
    server.start()
    yield server
    server.stop()


def answer(chrome: Chrome, text: str) -> None:
    asked = WebDriverWait(chrome, WAIT_SECONDS).until(alert_is_present())
    assert "密钥" in asked.text
    asked.send_keys(text)
    asked.accept()


def test_the_page_asks_for_a_key_and_keeps_it_for_its_tab(chrome: Chrome, guarded: Server, key: str) -> None:
    page = Page(chrome, guarded.url)
    chrome.get(f"{guarded.url}/?q=高血压")
    answer(chrome, "care_wrong")
    answer(chrome, key)
    page.until(page.ids)
    chrome.refresh()
    page.until(page.ids)
    complaints = page.console_errors()
    assert complaints
    assert all("401" in complaint for complaint in complaints)
    chrome.execute_script("sessionStorage.clear()")

"""The example corpus, served by the real service, in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from models.package import BUNDLED_PAIR
from tests.e2e.browser import Page, start_chromium
from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server(example_collection: Path) -> Iterator[Server]:
    running = Server(example_collection, CARE_ENCODER=str(BUNDLED_PAIR))
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Starts a Chromium with Chinese as its language."""
    browser = start_chromium(tmp_path_factory.mktemp("profile"), "zh-CN")
    yield browser
    browser.quit()


@pytest.fixture
def page(chrome: Chrome, server: Server) -> Iterator[Page]:
    """Yields the page with empty storage; the browser must log no errors during the test."""
    yield Page(chrome, server.url)
    complaints = Page(chrome, server.url).console_errors()
    chrome.execute_script("localStorage.clear()")
    assert complaints == []

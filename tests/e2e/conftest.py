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
    """A Chromium that speaks Chinese."""
    browser = start_chromium(tmp_path_factory.mktemp("profile"), "zh-CN")
    yield browser
    browser.quit()


@pytest.fixture
def page(chrome: Chrome, server: Server) -> Iterator[Page]:
    """The page, with nothing remembered; afterwards the browser must not have complained."""
    yield Page(chrome, server.url)
    complaints = Page(chrome, server.url).console_errors()
    chrome.execute_script("localStorage.clear()")
    assert complaints == []

"""Chromium with the search page, as a person uses it: type, press, read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_SECONDS = 60
WIDE = (1280, 900)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)
# Records every search that the page sends, and can hold answers back: `hold()` before, `release()` after.
SPY = """
window.asked = [];
let held = Promise.resolve();
window.hold = () => { held = new Promise((resolve) => { window.release = resolve; }); };
window.letPass = () => { held = Promise.resolve(); };
const plainFetch = window.fetch;
window.fetch = async (path, options) => {
  if (path !== "/v1/search") return plainFetch(path, options);
  window.asked.push(JSON.parse(options.body));
  const wait = held;
  const answer = await plainFetch(path, options);
  await wait;
  return answer;
};
"""


def start_chromium(profile: Path, language: str) -> Chrome:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("Chromium is missing: run the tests by `make test`, which installs chromium and chromium-driver")
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--lang={language}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"intl.accept_languages": language})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SPY})
    return chrome


@dataclass(frozen=True)
class Page:
    """The page in one tab."""

    chrome: Chrome
    url: str

    def open(self, address: str = "", size: tuple[int, int] = WIDE) -> None:
        """Loads the page afresh; `address` is what follows the host, such as "#q=…"."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.chrome.get("about:blank")  # otherwise a change of the fragment alone would load nothing
        self.chrome.get(f"{self.url}/{address}")
        self.until(lambda: self.all("#panel input"))

    def open_query(self, query: str, more: str = "", size: tuple[int, int] = WIDE) -> None:
        self.open(f"#q={quote(query)}{more}", size)
        self.until_answered()

    def search(self, query: str) -> None:
        """Types a query over the old one and presses Enter."""
        self.one("#query").send_keys(Keys.CONTROL, "a")
        self.one("#query").send_keys(query, Keys.ENTER)
        self.until_answered()

    def press(self, selector: str) -> None:
        self.one(selector).click()

    def set_day(self, name: str, day: str) -> None:
        """Sets a date field as a whole: how its parts are typed depends on the browser's language."""
        self.run(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))",
            self.one(f"#panel input[name={name}]"),
            day,
        )
        self.until_answered()

    def one(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)", selector
        )
        return found

    def ids(self) -> list[str]:
        """Returns the ids of the documents on the page, best first."""
        found: list[str] = self.run("return [...document.querySelectorAll('.hit')].map((hit) => hit.dataset.id)")
        return found

    def asked(self) -> list[dict[str, Any]]:
        """Returns the bodies of all searches since the page was loaded."""
        found: list[dict[str, Any]] = self.run("return window.asked")
        return found

    def run(self, script: str, *arguments: object) -> Any:  # noqa: ANN401 (a script returns anything)
        return self.chrome.execute_script(script, *arguments)

    def run_async(self, script: str, *arguments: object) -> Any:  # noqa: ANN401 (as above)
        """Runs the body of an async function and returns what it resolves to."""
        wrapped = f"const done = arguments[arguments.length - 1]; (async () => {{ {script} }})().then(done)"
        return self.chrome.execute_async_script(wrapped, *arguments)

    def until(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.chrome, WAIT_SECONDS).until(lambda _: condition())

    def until_answered(self) -> None:
        """Waits for the answer to the last search: hits, none, or an error."""
        self.until(
            lambda: self.run(
                "return !document.querySelector('[aria-busy], .skeleton')"
                " && !!document.querySelector('.hit, .none > *, .trouble > *')"
            )
        )

    def console_errors(self) -> list[str]:
        """Returns the browser's error messages since the last call."""
        entries: list[dict[str, Any]] = self.chrome.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

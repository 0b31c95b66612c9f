"""A real Chromium, driven by Selenium, and pages of simulated jobs in it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvdgloo._observe.page.page import Page
from hvdgloo.rendezvous._page_server.server import PageServer
from tests.support.observed import SimulatedJob

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

HERE = Path(__file__).parent
SECRET = bytes(range(32))
PATIENCE_S = 60.0
"""Seconds after which anything in a page counts as hanging."""

NARROW, USUAL, WIDE = 390, 1280, 3840
SCREEN, TALL = 900, 5000
"""Heights: of a usual window; and of one in which a page is seen from top to end, and so all of it is drawn."""

_PROGRAMS = ("chromium", "chromedriver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in CI, for which Chromium has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",  # as on a phone: they take no width
)


def missing() -> str:
    """Return the missing requirements; empty if there are none."""
    if importlib.util.find_spec("selenium") is None:
        return "there is no selenium"
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"there is no {' and no '.join(lacking)} (apt-get install chromium chromium-driver)" if lacking else ""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition holds; returns what it gave."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.02)
    return value


def stays(browser: Chromium, condition: str, *arguments: object) -> bool:
    """Tell whether a condition holds now, and after several frames, in which the browser lays out skipped parts."""
    frames = "let n = 10; const next = () => (n-- ? requestAnimationFrame(next) : arguments[0](true)); next();"
    held = [bool(browser.run(condition, *arguments))]
    for _ in range(3):
        browser.driver.execute_async_script(frames)
        held.append(bool(browser.run(condition, *arguments)))
    return all(held)


class Chromium:
    """A browser without a window.

    Texts are read from the DOM rather than as they look, so that what is scrolled out of sight counts as well.
    """

    def __enter__(self) -> Chromium:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in _FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_page_load_timeout(PATIENCE_S)
        self.driver.set_script_timeout(PATIENCE_S)
        self._expected: list[str] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.driver.quit()

    def reset(self) -> None:
        """An empty page of the usual size, in the light theme."""
        self.leave()
        self.resize(USUAL)
        self.theme("light")
        self.driver.delete_all_cookies()
        self.driver.get_log("browser")
        self._expected = []

    def leave(self) -> None:
        self.driver.get("about:blank")

    def command(self, name: str, **parameters: object) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def resize(self, width: int, height: int = TALL) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def theme(self, theme: str) -> None:
        """Set the system's preference: "light" or "dark"."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def run(self, script: str, *arguments: object) -> Any:
        """Run a function's body in the page."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector))

    def shown(self, selector: str) -> int:
        """Return the number of elements that are not hidden."""
        return int(
            self.run(
                "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).length",
                selector,
            )
        )

    def attribute(self, selector: str, name: str) -> str | None:
        value = self.run("return document.querySelector(arguments[0]).getAttribute(arguments[1])", selector, name)
        return None if value is None else str(value)

    def wait_for(self, selector: str, part: str) -> None:
        """Wait until an element's text has a part."""
        until(lambda: part in self.text(selector), f"{part!r} in {selector}, which says {self.text(selector)!r}")

    def press(self, *keys: str) -> None:
        """Press keys, on what has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def focus(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).focus()", selector)

    def click(self, selector: str) -> None:
        """Click as a pointer does: what lies above an element takes it."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def expect(self, *parts: str) -> None:
        """Complaints that have one of these parts are what the test is about."""
        self._expected += parts

    def complaints(self) -> list[str]:
        """Return the errors of pages: errors of scripts, and requests that a policy has refused."""
        said = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        # A browser asks for this on its own where a page names no icon, and is not let in.
        expected = ("/favicon.ico", *self._expected)
        return [text for text in said if not any(part in text for part in expected)]


class Shown:
    """A simulated job, its server, and its page, in a browser.

    Args:
        width, height: of the window in CSS pixels.
        control: as for ``PageServer``.
        fragment: of the address, as "rank-3".
    """

    def __init__(
        self,
        browser: Chromium,
        job: SimulatedJob,
        *,
        width: int = USUAL,
        height: int = TALL,
        control: Any = None,
        fragment: str = "",
    ) -> None:
        self.browser = browser
        self.job = job
        self.server = PageServer(Page(job.observatory, control), secret=SECRET)
        self._size = (width, height)
        self._fragment = fragment

    def __enter__(self) -> Shown:
        self.server.start()
        self.browser.resize(*self._size)
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()

    def open(self) -> None:
        """Open it by a fresh link."""
        self.browser.driver.get(self.server.link())
        until(lambda: self.browser.run("return document.readyState") == "complete", "the page is loaded")
        self.wait_until_drawn()
        if self._fragment:
            self.browser.run("location.hash = arguments[0]", self._fragment)

    def drawn(self) -> bool:
        return bool(self.browser.run("return performance.getEntriesByName('drawn').length > 0"))

    def advance(self, seconds: int = 1) -> None:
        """Let the job go on, and wait until the page has drawn that."""
        self.job.advance(seconds)
        self.wait_until_drawn()

    def wait_until_drawn(self) -> None:
        """Wait until the page has drawn what the job is now. The page tells; it is not asked again and again."""
        self.browser.driver.execute_async_script(
            """
            const [wanted, done] = arguments;
            const reached = () => (performance.getEntriesByName("drawn").at(-1)?.detail ?? 0) >= wanted;
            if (reached()) return done();
            new PerformanceObserver((list, observer) => {
              if (!reached()) return;
              observer.disconnect();
              done();
            }).observe({type: "mark"});
            """,
            self.job.observatory.snapshot().job.now,
        )


def axe(browser: Chromium) -> list[str]:
    """Return the findings of axe-core that are serious or worse, each with an element that has it."""
    browser.run((HERE / "vendor/axe.min.js").read_text())
    found = browser.driver.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document, {resultTypes: ['violations']}).then((results) => done(JSON.stringify(results.violations)))"
    )
    return [
        f"{each['impact']}: {each['id']}: {each['nodes'][0]['html'][:200]}: {each['nodes'][0]['failureSummary']}"
        for each in json.loads(found)
        if each["impact"] in ("serious", "critical", "moderate")
    ]


def drag(browser: Chromium, selector: str, begin: float, end: float) -> None:
    """Drag a pointer over an element, from one share of its width to another."""
    from selenium.webdriver.common.action_chains import ActionChains

    element = browser.find(selector)
    browser.run("arguments[0].scrollIntoView({block: 'center'})", element)
    width = element.size["width"]
    actions = ActionChains(browser.driver, duration=50)
    actions.move_to_element_with_offset(element, int(width * (begin - 0.5)), 0).click_and_hold()
    actions.move_to_element_with_offset(element, int(width * (end - 0.5)), 0).release().perform()


def words(texts: Sequence[str]) -> str:
    """Texts as one, with plain spaces."""
    return " ".join(texts).replace("\u00a0", " ")

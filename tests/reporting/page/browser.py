"""A real browser, where there is one: Chromium without a window, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Visit:
    """A page that was opened, and whatever it complained of or asked the network for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.asked_for.append(request.url))

    def open(self, html: str, path: Path) -> None:
        path.write_text(html, encoding="utf-8")
        self.page.goto(path.as_uri())

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def column(self, number: int) -> list[str]:
        """A column of the table of ops, counted from 1: what the rows in sight say, from top to bottom."""
        cells = self.page.locator(f"#rows tbody tr:not(.spacer) td:nth-child({number})")
        return [str(said) for said in cells.all_inner_texts()]

    def drawn(self, canvas: str) -> int:
        """How many colours a canvas shows; one that is empty shows one."""
        self.settle()
        colours = """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
        return int(self.page.locator(canvas).evaluate(colours))

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@contextmanager
def browser() -> Iterator[Any]:
    """A running browser; skips the test where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="no browser: pip install playwright")
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt install chromium)")
    with driver.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()

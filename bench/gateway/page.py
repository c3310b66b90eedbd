"""The gateway's page in Chromium: how long a person who has never been there waits for it.

A gateway without a worker serves it, on the embedded Redis. Each visit is of a new person, with an empty cache;
beside it, the second visit of one. The times are Chromium's own, from the beginning of the navigation: the first
content painted, and all files loaded. A page of one word from the same gateway shows what Chromium takes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from bench.gateway.served import median, serving
from bench.harness.report import NotAvailableError, Report, arguments

WEIGHT_KB = 150.0
FIGURES = {
    "first content of the page, for a new person": 300.0,
    "  all its files": None,
    "  at a second visit": None,
    "first content of a page of one word": None,
}
"""With their targets, in ms; in the order of `visits`."""
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_PAINTED = """() => new Promise((told) => {
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) if (one.name === "first-contentful-paint") told(one.startTime);
  }).observe({ type: "paint", buffered: true });
})"""
_LOADED = """() => {
  const all = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  return Math.max(...all.filter((one) => !one.name.includes("/v1/")).map((one) => one.responseEnd));
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Raises `NotAvailableError`."""
    try:
        from playwright import sync_api
    except ImportError:
        raise NotAvailableError("no Playwright: pip install playwright") from None
    found = os.environ.get("PETIOLE_CHROMIUM") or next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            raise NotAvailableError(f"no Chromium: {str(error).splitlines()[0]}") from None
        yield browser
        browser.close()


def visits(browser: Any, url: str, word: str) -> tuple[float, ...]:
    """The milliseconds that a new visitor waits: for the page's first content, for all its files, for the first
    content of a second visit, and for that of a page of one word."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(url)
        first = page.evaluate(_PAINTED)
        loaded = page.evaluate(_LOADED)
        page.goto("about:blank")
        page.goto(url)
        again = page.evaluate(_PAINTED)
        page.goto(word)
        return first, loaded, again, page.evaluate(_PAINTED)
    finally:
        context.close()


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.servers import embedded
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    embedded.socket_path()
    settings.cache_clear()
    report = Report("the page: its first content in Chromium")
    rounds = 2 if options.quick else 20
    with serving() as gateway:
        root = gateway.url.removesuffix("/v1")
        report.add("the page and all its files", weight_kb(root), "kB", target=WEIGHT_KB, better="lower")
        try:
            with chromium() as browser:
                seen = [visits(browser, f"{root}/", f"{root}/health") for _ in range(rounds + 1)][1:]
        except NotAvailableError as error:
            report.absent["first content"] = str(error)
            seen = []
    for of, (name, target) in zip(zip(*seen, strict=True), FIGURES.items(), strict=False):
        median(report, name, "ms", of, target=target)
    report.finish(options.json)
    return 0


def weight_kb(root: str) -> float:
    from petiole.gateway.routes.page import FILES

    paths = ["", *(f"page/{name}" for name in FILES)]
    return sum(len(urlopen(f"{root}/{path}").read()) for path in paths) / 1000


if __name__ == "__main__":
    sys.exit(main())

"""Questions of users: the first result of the site's search answers each, or leads there with one click.

The ranking is the site's own, `docs/search.js`, in Node. The sections are those of `site/search.json`, where `make
docs` has built it, and otherwise those of the pages. In Chromium a question is typed into the built site.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from docs.site import DOCS, INDEX
from tests.support.browser import chromium
from tests.support.site import REPOSITORY

QUESTIONS: dict[str, str] = tomllib.loads((REPOSITORY / "tests/project/questions.toml").read_text())
SITE = REPOSITORY / "site"
NODE = shutil.which("node")
# argv: the program of the search. Standard input: a line with the sections, then one for each question.
ASK = """
const [index, ...questions] = require("fs").readFileSync(0, "utf8").split("\\n").filter(Boolean).map(JSON.parse);
let said;
globalThis.self = { postMessage: (message) => (said = message) };
require(process.argv[1]);
self.onmessage({ data: { type: 0, data: index } });
for (const input of questions) {
  self.onmessage({ data: { type: 2, data: { input } } });
  console.log(said.data.items[0].id);
}
"""

needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


@cache
def sections() -> list[dict[str, Any]]:
    if (SITE / "search.json").exists():
        items: list[dict[str, Any]] = json.loads((SITE / "search.json").read_text())["items"]
        return items
    return [
        {
            "location": "" if page.name == INDEX else page.stem + "/",
            "level": heading.partition(" ")[0].count("#"),
            "title": heading.strip("# "),
            "text": text,
        }
        for page in sorted(DOCS.glob("*.md"))
        for part in re.split(r"^(?=#+ )", page.read_text(), flags=re.M)
        for heading, _, text in [part.partition("\n")]
    ]


def page_of(section: dict[str, Any]) -> str:
    name = section["location"].partition("#")[0].strip("/")
    return f"{name}.md" if name else INDEX


@cache
def first_pages() -> dict[str, str]:
    """By question, the page of the first result."""
    lines = "".join(json.dumps(line) + "\n" for line in ({"items": sections()}, *QUESTIONS))
    command = [str(NODE), "-e", ASK, str(DOCS / "search.js")]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = (page_of(sections()[int(line)]) for line in done.stdout.split())
    return dict(zip(QUESTIONS, found, strict=True))


def one_click(page: str) -> set[str]:
    """The page, and those that it links to."""
    text = (DOCS / page).read_text() if (DOCS / page).exists() else ""  # the page of the Python names is no file
    return {page, *re.findall(r"\]\(([\w-]+\.md)", text)}


def test_all_questions_are_asked() -> None:
    assert len(QUESTIONS) == 54
    assert {page for page in QUESTIONS.values() if not (DOCS / page).exists()} == set()


@needs_node
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_result_answers_or_leads_there(question: str) -> None:
    assert QUESTIONS[question] in one_click(first_pages()[question]), first_pages()[question]


@needs_node
def test_most_are_answered_at_once() -> None:
    wrong = [question for question, page in QUESTIONS.items() if first_pages()[question] != page]
    assert len(QUESTIONS) - len(wrong) >= 42, wrong


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.skipif(not SITE.exists(), reason="needs the site: make docs")
def test_a_question_is_typed_into_the_site() -> None:
    with served() as address, chromium() as browser:
        page = browser.new_page()
        page.goto(address)
        page.keyboard.press("/")
        page.locator("input[role=combobox]").fill("task stuck in PENDING forever")
        page.locator("[role=listbox] a").first.click()
        page.wait_for_url("**/symptoms/**")
        assert "pending" in page.locator("h2:target").inner_text().lower()


@pytest.mark.skipif(not SITE.exists(), reason="needs the site: make docs")
def test_a_row_of_a_table_is_a_block_on_a_phone() -> None:
    with served() as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"{address}performance/")
        first, second = page.locator("table").first.locator("tbody tr").first.locator("td").all()[:2]
        assert first.bounding_box()["y"] < second.bounding_box()["y"]
        assert second.get_attribute("data-column") == "measured"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.skipif(not (SITE / "mermaid.min.js").exists(), reason="needs the site, with npm: make docs")
def test_every_diagram_is_drawn() -> None:
    diagrams = (DOCS / "lives.md").read_text().count("```mermaid\n")
    with served() as address, chromium() as browser:
        page = browser.new_page()
        failed: list[object] = []
        page.on("pageerror", lambda error: failed.append(error))
        page.goto(f"{address}lives/")
        page.wait_for_function(
            f"document.querySelectorAll('pre.diagram[data-processed] svg').length == {diagrams}"
        )
        assert failed == []

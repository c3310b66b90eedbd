"""The page in a real browser: what a person does, and what dies meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from petiole.gateway.serving.auth.api_keys import digest_of
from tests.support.gateway import Gateway
from tests.support.site import Site

pytestmark = pytest.mark.e2e

MOST = 60
PATIENCE_MS = 90_000
WRITTEN = """\
# A <b>head</b>

<img src=x onerror=alert(1)> **bold** `code`
- one
- two

```
<script>1</script>
```
[x](javascript:alert(1)) [y](https://example.org/)"""


@pytest.fixture
def page(browser: Any, slow_gateway: Gateway) -> Iterator[Any]:
    """The page, as a person who has never been there finds it. It must not complain."""
    complaints: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{slow_gateway.root}/")
    page.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
    yield page
    context.close()
    assert not complaints


def tune(page: Any, **wanted: str) -> None:
    page.get_by_label("Settings of the answer").click()
    for name, value in wanted.items():
        page.locator(f"#settings [name={name}]").fill(value)
    page.get_by_role("button", name="Done").click()


def say(page: Any, text: str) -> Any:
    """Say it, and wait until the answer has begun. Returns the answer."""
    before = page.locator(".answer").count()
    page.get_by_label("Message", exact=True).last.fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").nth(before)
    answer.locator(".words p").wait_for()
    return answer


def text_of(answer: Any) -> str:
    """The whole text, when the answer has ended."""
    answer.locator(".facts").wait_for()
    return str(answer.locator(".words").inner_text()).strip()


def expected(text: str, seed: int, most: int = MOST) -> str:
    from petiole.gpu_worker.request import Request, SamplingParams
    from tests.support.fake_engine import token, word

    request = Request(messages=[{"role": "user", "content": text}], sampling=SamplingParams(seed=seed))
    return "".join(word(token(request, index)) for index in range(most)).strip()


def test_a_message_is_answered_and_the_conversation_goes_on(page: Any) -> None:
    tune(page, seed="1", max_output_tokens="12")
    answer = say(page, "hello")
    assert text_of(answer) == expected("hello", 1, 12)
    assert "12 tokens" in answer.locator(".facts").inner_text()
    text_of(say(page, "again"))
    page.locator(".answer").nth(1).get_by_role("button", name="As curl").click()
    asked, again = (page.locator(f"#curl-{name}").inner_text() for name in ("ask", "again"))
    body = json.loads(asked.partition("-d '")[2].removesuffix("'"))
    assert (body["input"], body["previous_response_id"][:5], body["seed"]) == ("again", "resp_", 1)
    assert "starting_after=0" in again
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New").click()
    page.get_by_role("heading", name="What would you like to know?").wait_for()
    assert page.locator(".answer").count() == 0


def test_a_thought_is_folded_until_a_person_opens_it(page: Any) -> None:
    """No small model thinks, so the events are made up here."""
    of = {"id": "resp_x", "status": "in_progress"}
    told = [
        {"type": "response.created", "response": of},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning"}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "Six times seven <b>is</b> 42."},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message"}},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "42"},
        {"type": "response.completed", "response": {**of, "status": "completed"}},
    ]
    lines = "".join(f"data: {json.dumps({**one, 'sequence_number': at})}\n\n" for at, one in enumerate(told))
    page.route("**/v1/responses", lambda route: route.fulfill(content_type="text/event-stream", body=lines))
    answer = say(page, "What is 6 times 7?")
    thought, summary = answer.locator("details.thought > div"), answer.locator("summary")
    assert (summary.inner_text(), thought.is_visible()) == ("Thought", False)
    summary.press("Enter")
    thought.wait_for()
    assert thought.inner_text() == "Six times seven <b>is</b> 42."
    assert answer.locator(".words").inner_text() == "42"
    page.reload()
    page.locator(".answer summary").wait_for()
    assert not page.locator(".answer .thought > div").is_visible()


def test_an_answer_is_stopped(page: Any) -> None:
    tune(page, max_output_tokens="4000")
    answer = say(page, "hello")
    page.get_by_role("button", name="Stop the answer").click()
    assert "stopped" in (text_of(answer) and answer.locator(".facts").inner_text())
    page.get_by_label("Send").wait_for()


def test_a_page_that_is_reloaded_in_mid_answer_reads_on(page: Any) -> None:
    long = 5 * MOST  # so that a busy machine reloads it before its end
    tune(page, seed="2", max_output_tokens=str(long))
    say(page, "hello")
    page.reload()
    answer = page.locator(".answer")
    assert text_of(answer) == expected("hello", 2, long)
    assert "resumed, nothing lost" in answer.inner_text()
    page.reload()
    assert text_of(page.locator(".answer")) == expected("hello", 2, long)


def test_an_answer_goes_on_when_its_worker_is_killed(page: Any, slow_site: Site) -> None:
    tune(page, seed="3", max_output_tokens=str(MOST))
    answer = say(page, "hello")
    slow_site.workers[-1].kill()
    slow_site.worker()
    assert text_of(answer) == expected("hello", 3)


def test_an_answer_goes_on_when_its_gateway_is_killed(browser: Any, slow_site: Site, tmp_path: Path) -> None:
    """Another one takes its port, as a balancer would send the page to another."""
    with Gateway(tmp_path, PETIOLE_BROKER_URL=slow_site.url) as first:
        page = browser.new_context().new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{first.root}/")
        page.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
        tune(page, seed="4", max_output_tokens=str(MOST))
        answer = say(page, "hello")
        first.kill()
        answer.locator(".waits").wait_for()
        with Gateway(tmp_path, PETIOLE_BROKER_URL=slow_site.url, PETIOLE_GATEWAY_PORT=first.port) as second:
            assert second.url == first.url
            assert text_of(answer) == expected("hello", 4)
            assert "resumed, nothing lost" in answer.inner_text()
        page.context.close()


def test_the_fleet_is_shown_and_a_generation_is_cancelled_there(page: Any, slow_site: Site) -> None:
    page.get_by_role("link", name="Fleet").click()
    page.locator(".card", has_text=slow_site.workers[-1].name).locator(".state", has_text="ready").wait_for()
    page.locator("#generations-part").wait_for(state="hidden")  # those of the tests before have ended
    page.get_by_role("link", name="Chat").click()
    tune(page, max_output_tokens="4000")
    say(page, "hello")
    page.get_by_role("link", name="Fleet").click()
    row = page.locator("#generations tbody tr")
    row.wait_for()
    assert row.first.inner_text().split()[:2] == ["response", "petiole-tiny"]
    assert page.locator("#queues tbody tr").count() == 1
    age = row.first.locator("td").nth(3)
    seen = age.inner_text()
    page.get_by_role("button", name="Cancel this response").focus()
    age.filter(has_not_text=re.compile(f"^{re.escape(seen)}$")).wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Cancel", "the table is new, the focus is kept"
    page.keyboard.press("Enter")
    page.locator("#generations-part").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("link", name="Chat").click()
    page.locator(".answer .facts", has_text="stopped").wait_for()


def test_a_gateway_with_keys_asks_for_one_once(browser: Any, slow_site: Site, tmp_path: Path) -> None:
    key = "ptl-" + "p" * 43
    document = {"tenants": {"acme": {"salt": "s"}}, "keys": {digest_of(key): {"tenant": "acme"}}}
    (tmp_path / "keys.json").write_text(json.dumps(document))
    told = {"PETIOLE_BROKER_URL": slow_site.url, "PETIOLE_GATEWAY_KEYS_FILE": tmp_path / "keys.json"}
    with Gateway(tmp_path, **told) as keyed:
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(f"{keyed.root}/")
        for given in ("wrong", key):
            page.locator("#key[open] input").fill(given)
            page.get_by_role("button", name="Continue").click()
        page.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
        tune(page, max_output_tokens="4000")
        answer = say(page, "hello")
        page.get_by_role("link", name="Fleet").click()
        page.locator("#generations tbody tr").wait_for()
        page.reload()
        page.get_by_role("link", name="Chat").click()
        page.get_by_role("button", name="Stop the answer").click()
        answer.locator(".facts", has_text="stopped").wait_for()
        page.get_by_role("link", name="Fleet").click()
        used = page.locator("#usage tbody tr", has_text="acme")
        used.wait_for()
        assert used.locator(".number").first.inner_text() == "1", "requests"
        context.close()


def test_a_model_writes_no_html(page: Any) -> None:
    """Text is shown as text, in whatever form it comes."""
    page.evaluate(
        """async (text) => {
          const { write } = await import("./page/words.js");
          const where = Object.assign(document.createElement("div"), { id: "tried" });
          document.body.append(where);
          write(where, text);
        }""",
        WRITTEN,
    )
    tried = page.locator("#tried")
    assert tried.locator("b, img, script").count() == 0
    assert [one.get_attribute("href") for one in tried.locator("a").all()] == ["https://example.org/"]
    assert tried.locator("h2").inner_text() == "A <b>head</b>"
    assert tried.locator("li").count() == 2
    assert tried.locator("pre").inner_text() == "<script>1</script>"


def test_it_is_used_without_a_mouse_and_fits_a_phone(browser: Any, slow_gateway: Gateway) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{slow_gateway.root}/#fleet")
    page.locator(".card").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.goto(f"{slow_gateway.root}/#chat")
    page.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
    named = page.locator("button:visible, select:visible, textarea:visible, a:visible").all()
    assert all((one.get_attribute("aria-label") or one.inner_text()).strip() for one in named)
    page.locator("body").press("/")
    assert page.evaluate("document.activeElement.id") == "said"
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.locator(".answer .words p").wait_for()
    page.keyboard.press("Escape")
    page.locator(".answer .facts", has_text="stopped").wait_for()
    context.close()


RICH = """\
| a | b |
|---|--:|
| 1 | <i>2</i> |

- one
  1. first
  2. second
- two

---
```python
print(1)
```"""


def test_tables_nested_lists_rules_and_code_are_shown(page: Any) -> None:
    page.evaluate(
        """async (text) => {
          const { write } = await import("./page/words.js");
          const where = Object.assign(document.createElement("div"), { id: "tried", className: "words" });
          document.body.append(where);
          write(where, text);
        }""",
        RICH,
    )
    tried = page.locator("#tried")
    assert tried.locator("td").all_inner_texts() == ["1", "<i>2</i>"]
    assert tried.locator("td.right").count() == 1
    assert tried.locator("ul > li > ol > li").all_inner_texts() == ["first", "second"]
    assert tried.locator("hr").count() == 1
    assert tried.locator(".code .note").inner_text() == "python"


def test_two_tabs_keep_two_conversations(page: Any) -> None:
    tune(page, max_output_tokens="3")
    text_of(say(page, "one"))
    other = page.context.new_page()
    other.goto(page.url)
    other.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
    text_of(say(other, "two"))
    for tab, said in ((page, "one"), (other, "two")):
        tab.reload()
        assert tab.locator(".bubble").all_inner_texts() == [said]
    page.get_by_role("button", name="Talks").click()
    page.locator("#past-list li", has_text="two").get_by_role("button").first.click()
    assert page.locator(".bubble").all_inner_texts() == ["two"]
    page.get_by_role("button", name="Talks").click()
    page.get_by_role("button", name="Forget two").click()
    assert page.locator("#past-list li").count() == 1
    assert page.locator(".bubble").count() == 0


def test_a_message_is_edited_and_sent_again(page: Any) -> None:
    tune(page, max_output_tokens="3")
    text_of(say(page, "one"))
    text_of(say(page, "two"))
    page.locator(".said").first.hover()
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Message", exact=True).last.fill("uno")
    page.keyboard.press("Enter")
    page.locator(".answer .facts").wait_for()
    assert page.locator(".bubble").all_inner_texts() == ["uno"]


def test_a_conversation_that_the_gateway_has_forgotten_goes_on(page: Any, slow_gateway: Gateway) -> None:
    tune(page, max_output_tokens="3")
    text_of(say(page, "one"))
    name = page.evaluate("Object.entries(localStorage).find(([key]) => key.startsWith('petiole.talk.'))[1]")
    before = json.loads(name)["turns"][0]["answer"]["id"]
    httpx2.delete(f"{slow_gateway.url}/responses/{before}").raise_for_status()
    again = page.context.new_page()  # a browser complains of the gateway's refusal
    again.goto(page.url)
    again.get_by_role("button", name="Talks").click()
    again.locator("#past-list li").get_by_role("button").first.click()
    assert text_of(say(again, "two"))


def keyed_page(browser: Any, gateway: Gateway, key: str) -> Any:
    """A browser of its own, whose person has given the key."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{gateway.root}/")
    page.locator("#key[open] input").fill(key)
    page.keyboard.press("Enter")
    page.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
    return page


def test_a_tenants_conversation_is_in_each_of_its_browsers(browser: Any, slow_site: Site, tmp_path: Path) -> None:
    keys = {"ptl-one": "acme", "ptl-two": "acme", "ptl-other": "globex"}
    document = {
        "tenants": {name: {"salt": name} for name in keys.values()},
        "keys": {digest_of(key): {"tenant": tenant} for key, tenant in keys.items()},
    }
    told = {"PETIOLE_BROKER_URL": slow_site.url, "PETIOLE_GATEWAY_KEYS": json.dumps(document)}
    with Gateway(tmp_path, **told) as keyed:
        one, two, other = (keyed_page(browser, keyed, key) for key in keys)
        for page in (one, two):
            tune(page, max_output_tokens="3")
        one.get_by_role("button", name="Talks").click()
        one.locator("#share").check()
        one.keyboard.press("Escape")
        first = text_of(say(one, "from one"))
        two.get_by_role("button", name="Talks").click()
        two.locator("#past-shared button", has_text="from one").first.click()
        two.locator(".bubble", has_text="from one").wait_for()
        assert two.locator(".answer .words").inner_text().strip() == first
        text_of(say(two, "from two"))
        one.get_by_role("button", name="Talks").click()
        one.locator("#past-shared button", has_text="from one").first.click()
        one.locator(".bubble", has_text="from two").wait_for()
        one.locator(".answer").last.get_by_role("button", name="Again").click()
        text_of(one.locator(".answer").last)
        text_of(say(one, "alone"))
        two.reload()
        two.get_by_role("button", name="Talks").click()
        two.locator("#past-shared button", has_text="from one").first.click()
        assert two.locator(".bubble").all_inner_texts() == ["from one", "from two"]
        other.get_by_role("button", name="Talks").click()
        other.locator("#past-tenant").wait_for()
        assert other.locator("#past-shared li").count() == 0
        for page in (one, two, other):
            page.context.close()


@pytest.mark.parametrize("kept", ["{", "[]", '{"turns": [{}, 3, null, {"answer": {"parts": 1}}]}', "null"])
def test_what_is_damaged_in_storage_is_left_out(page: Any, kept: str) -> None:
    page.evaluate(
        """(kept) => {
          sessionStorage.setItem("petiole.open", "x");
          for (const key of ["petiole.talk.x", "petiole.ways", "petiole.chat"]) localStorage.setItem(key, kept);
        }""",
        kept,
    )
    page.reload()
    page.locator("#model option[value='petiole-tiny']").wait_for(state="attached")
    tune(page, max_output_tokens="3")
    assert text_of(say(page, "one"))


def test_a_full_storage_drops_the_oldest_conversations(page: Any) -> None:
    page.evaluate(
        """() => {
          const turns = "x".repeat(1 << 20);
          const old = (at) => localStorage.setItem(`petiole.talk.${at}`, JSON.stringify({ at, turns }));
          [0, 1, 2, 3].forEach(old);
          let rest = 1 << 20;
          for (; rest; rest >>= 1) try { localStorage.setItem(`other${rest}`, "x".repeat(rest)); } catch {}
        }"""
    )
    tune(page, max_output_tokens="3")
    text_of(say(page, "one"))
    page.reload()
    assert page.locator(".bubble").all_inner_texts() == ["one"]
    assert page.evaluate("localStorage.getItem('petiole.talk.0')") is None


def test_text_is_copied_over_plain_http_and_files_of_text_are_sent(page: Any) -> None:
    tune(page, max_output_tokens="3")
    page.locator("#file").set_input_files(files=[{"name": "a.md", "mimeType": "text/markdown", "buffer": b"# Hi"}])
    answer = say(page, "read it")
    assert "a.md" in page.locator(".said").inner_text()
    said = text_of(answer)
    page.evaluate(
        """() => {
          Object.defineProperty(navigator, "clipboard", { value: undefined });
          document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
        }"""
    )
    answer.get_by_role("button", name="Copy").click()
    answer.get_by_text("Copied").wait_for()
    assert page.evaluate("window.copied").strip() == said
    page.locator("#file").set_input_files(files=[{"name": "b.bin", "mimeType": "", "buffer": b"\xff\x00"}])
    page.locator("#refused", has_text="b.bin: must be text in UTF-8.").wait_for()

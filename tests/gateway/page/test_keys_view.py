"""Tenants and their keys on the page, in a real browser, for a person with the right to change them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
import redis

from petiole.gateway.serving.auth.api_keys import digest_of
from petiole.tasks.wire.keys import usage_keys
from tests.support.gateway import Gateway
from tests.support.site import RedisServer, eventually

pytestmark = pytest.mark.e2e

ADMIN, PLAIN = "ptl-admin", "ptl-plain"
DOCUMENT = {
    "tenants": {"operators": {"salt": "s"}},
    "keys": {
        digest_of(ADMIN): {"tenant": "operators", "rights": ["admin"]},
        digest_of(PLAIN): {"tenant": "operators"},
    },
}
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def keyed(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """After `browser`: without one, no gateway starts."""
    folder = tmp_path_factory.mktemp("keys")
    server = RedisServer(folder)
    try:
        with Gateway(folder, PETIOLE_BROKER_URL=server.url, PETIOLE_GATEWAY_KEYS=json.dumps(DOCUMENT)) as gateway:
            with httpx2.Client(base_url=gateway.url, headers={"authorization": f"Bearer {ADMIN}"}) as http:
                budgets = {"day_tokens": 100, "month_tokens": 1000}
                assert http.post("/admin/tenants/acme", json={"limits": budgets}).status_code == 200
            with redis.Redis(unix_socket_path=str(server.socket)) as store:
                store.hset(usage_keys(f"{datetime.now(UTC):%Y-%m-%d}")[1], '["acme","m"] output', 85)
            yield gateway
    finally:
        server.kill()


def opened(browser: Any, gateway: Gateway, key: str, where: str = "keys", **options: Any) -> Any:
    """The page, for a person who has given this key."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{gateway.root}/#{where}")
    page.locator("#key[open] input").fill(key)
    page.get_by_role("button", name="Continue").click()
    return page


@pytest.fixture
def page(browser: Any, keyed: Gateway) -> Iterator[Any]:
    page = opened(browser, keyed, ADMIN)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.locator("#tenants .card").first.wait_for()
    yield page
    page.context.close()
    assert not complaints


def tenant(page: Any, name: str) -> Any:
    return page.get_by_label(f"Tenant {name}", exact=True)


def status(gateway: Gateway, key: str) -> int:
    return httpx2.get(f"{gateway.url}/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_a_key_is_made_changed_and_revoked_by_a_person(page: Any, keyed: Gateway) -> None:
    page.get_by_role("button", name="New key").click()
    page.locator("#key-form [name=tenant]").fill("globex")
    page.locator("#key-form [name=note]").fill("the <b>job</b>")
    page.locator("#key-form [name=requests]").fill("60")
    page.locator("#key-form [name=expires_at]").fill("2099-01-31")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator("#made[open]").wait_for()
    secret = page.locator("#made-key").inner_text()
    assert status(keyed, secret) == 200
    page.get_by_role("button", name="Done").click()
    page.locator("#made-key", has_text="ptl-").wait_for(state="detached")
    assert secret not in page.content(), "it is shown once"

    row = tenant(page, "globex").locator("tbody tr")
    assert row.count() == 1
    for text in ("the <b>job</b>", "Requests a minute: 60", "2099-01-31", digest_of(secret)[:12]):
        row.get_by_text(text).wait_for()

    row.get_by_role("button", name="Change the key").click()
    form = page.locator("#key-form")
    assert form.locator("[name=tenant]").is_disabled()
    assert form.locator("[name=requests]").input_value() == "60"
    form.locator("[name=requests]").fill("")
    form.locator("[name=note]").fill("another job")
    form.locator("[name=admin]").check()
    page.get_by_role("button", name="Save", exact=True).click()
    row.get_by_text("another job").wait_for()
    row.get_by_text("Right: admin").wait_for()
    assert row.get_by_text("Requests a minute").count() == 0
    page.locator("button:focus", has_text="Change").wait_for()
    assert page.evaluate("document.activeElement.dataset.of") == f"key-{digest_of(secret)[:12]}", "focus is kept"

    row.get_by_role("button", name="Revoke the key").click()
    page.get_by_role("button", name="Keep it").click()
    assert row.count() == 1
    row.get_by_role("button", name="Revoke the key").click()
    page.locator("#revoke").get_by_role("button", name="Revoke").click()
    tenant(page, "globex").get_by_text("It has no key.").wait_for()
    eventually(lambda: status(keyed, secret) == 401, "it is revoked")


def test_a_double_click_makes_one_key(page: Any) -> None:
    """Of two, the second one's secret would stand in place of the first one's."""
    page.get_by_role("button", name="New key").click()
    page.locator("#key-form [name=tenant]").fill("hasty")
    save = page.get_by_role("button", name="Save", exact=True)
    held: list[Any] = []
    page.route(
        "**/v1/admin/keys",
        lambda route: held.append(route) if route.request.method == "POST" else route.continue_(),
    )
    with page.expect_request("**/v1/admin/keys"):
        save.dblclick()
    page.locator("#key-form button:disabled", has_text="Save").wait_for()
    for route in held:
        route.continue_()
    page.locator("#made[open]").wait_for()
    page.get_by_role("button", name="Done").click()
    tenant(page, "hasty").locator("tbody tr").wait_for()
    assert (len(held), tenant(page, "hasty").locator("tbody tr").count()) == (1, 1)
    page.get_by_role("button", name="New key").click()
    assert save.is_enabled()
    page.keyboard.press("Escape")


def test_what_was_used_stands_against_the_budgets(page: Any) -> None:
    acme = tenant(page, "acme")
    today, month = acme.locator(".meter").all()
    assert "85 of 100 tokens" in today.inner_text()
    assert "85 of 1,000 tokens" in month.inner_text()
    assert ("near" in today.get_attribute("class"), "far" in month.get_attribute("class")) == (True, True)
    acme.get_by_role("button", name="Change the tenant acme").click()
    page.locator("#tenant-form [name=day_tokens]").fill("85")
    page.locator("#tenant-form [name=models]").fill("chat, qwen*")
    page.get_by_role("button", name="Save", exact=True).click()
    acme.get_by_text("Models: chat, qwen*").wait_for()
    assert "gone" in acme.locator(".meter").first.get_attribute("class")
    assert tenant(page, "operators").get_by_role("button", name="Change").count() == 0, "it is in the settings"
    assert tenant(page, "operators").get_by_text("From the gateway's settings").count() == 1


def test_what_the_gateway_refuses_is_told_in_the_dialog(page: Any) -> None:
    tenant(page, "acme").get_by_role("button", name="Change the tenant acme").click()
    field = page.locator("#tenant-form [name=queue]")
    field.fill("q" * 300)
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator("#tenant-form-error", has_text="queue:").wait_for()
    assert field.input_value() == "q" * 300, "nothing that was typed is lost"
    page.locator("#tenant-form button:focus", has_text="Save").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.locator("#tenant-form[open]").wait_for(state="detached")


def test_who_lacks_the_right_sees_no_way_there(browser: Any, keyed: Gateway) -> None:
    page = opened(browser, keyed, PLAIN, "chat")
    page.locator("#welcome").wait_for()
    page.wait_for_load_state("networkidle")
    assert page.get_by_role("link", name="Keys").count() == 0
    page.goto(f"{keyed.root}/#keys")
    page.locator("#keys-error", has_text="the right admin").wait_for()
    assert page.locator("#tenants .card").count() == 0
    page.context.close()


def test_it_fits_a_phone_and_needs_no_mouse(browser: Any, keyed: Gateway) -> None:
    page = opened(browser, keyed, ADMIN, viewport={"width": 360, "height": 700}, color_scheme="dark")
    page.get_by_role("link", name="Keys").wait_for()
    tenant(page, "acme").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.goto(f"{keyed.root}/#chat")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.goto(f"{keyed.root}/#keys")
    page.locator("#key-new").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("acme")
    page.keyboard.press("Enter")
    page.locator("#made[open]").wait_for()
    page.keyboard.press("Escape")
    made = tenant(page, "acme").locator("tbody tr")
    made.wait_for()
    named = page.locator("button:visible, a:visible").all()
    assert all((one.get_attribute("aria-label") or one.inner_text()).strip() for one in named)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.context.close()

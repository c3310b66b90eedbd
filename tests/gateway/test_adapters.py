"""Adapters loaded and unloaded over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from bench.harness.checkpoints.decoders import Shape, write_adapter
from petiole.gateway.serving.auth.api_keys import digest_of
from petiole.tasks.fleet import models
from petiole.tasks.fleet.loaded_adapters import MOST, LoadedAdapter
from petiole.tasks.wire.keys import ADAPTERS_KEY
from tests.gateway.conftest import REAL
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

TINY = Shape("petiole-tiny", "bfloat16", 512, 256, 512, 4, 4, 2, 64)
KEEPER, PLAIN = "ptl-keeper", "ptl-plain"
DOCUMENT = {
    "tenants": {
        "acme": {"salt": "s"},
        "few": {"salt": "f", "models": ["petiole-*"]},
        "other": {"salt": "o"},
        "apart": {"salt": "a", "queue": "apart"},
    },
    "keys": {
        digest_of(KEEPER): {"tenant": "acme", "rights": ["adapters"]},
        digest_of(PLAIN): {"tenant": "acme", "rights": ["admin"]},
        digest_of("few"): {"tenant": "few", "rights": ["adapters"]},
        digest_of("other"): {"tenant": "other", "rights": ["adapters"]},
        digest_of("apart"): {"tenant": "apart", "rights": ["adapters"]},
        digest_of("chief"): {"tenant": "other", "rights": ["adapters", "admin"]},
    },
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of petiole-tiny, of which the settings allow one folder, and no adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("allowed/one", "elsewhere/two")):
        write_adapter(TINY, folder / name, rank=4, seed=seed, spread=0.3)
    (folder / "allowed" / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def site(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    of_adapters = {
        "PETIOLE_LORA_SLOTS": 2,
        "PETIOLE_LORA_FILES": adapters / "allowed",
        "PETIOLE_SERVED_ADAPTERS": f"served={adapters / 'allowed' / 'one'}",
    }
    with Site(tmp_path_factory.mktemp("adapting"), **REAL, **of_adapters) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


@pytest.fixture(scope="module")
def told(site: Site) -> dict[str, Any]:
    return {"PETIOLE_BROKER_URL": site.url, "PETIOLE_GATEWAY_KEYS": json.dumps(DOCUMENT)}


@pytest.fixture(scope="module")
def gateway(told: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("serve"), **told) as gateway:
        yield gateway


@pytest.fixture
def http(site: Site, gateway: Gateway) -> Iterator[httpx2.Client]:
    """The requests of who may load, with nothing loaded."""
    site.redis.delete(ADAPTERS_KEY)
    with client(gateway, KEEPER) as http:
        yield http


def client(of: Gateway, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=of.url, timeout=60, headers={"authorization": f"Bearer {key}"})


def load(http: httpx2.Client, path: Path | str, name: str = "sql", **more: Any) -> httpx2.Response:
    return http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def refused(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def said(http: httpx2.Client, model: str) -> str:
    answer = http.post("/chat/completions", json={**CHAT, "model": model, "max_tokens": 8})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_loaded_adapter_is_a_model_of_every_gateway_and_of_workers_that_start_later(
    http: httpx2.Client, site: Site, adapters: Path, told: dict[str, Any], tmp_path: Path
) -> None:
    answer = load(http, adapters / "allowed" / "one")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    [card] = [one for one in http.get("/models").json()["data"] if one["id"] == "sql"]
    assert (card["root"], card["parent"]) == (str(adapters / "allowed" / "one"), "petiole-tiny")
    plain, changed = said(http, "petiole-tiny"), said(http, "sql")
    assert plain != changed
    [first] = site.workers
    second = site.worker()
    first.stop()
    with Gateway(tmp_path, **told) as other, client(other, PLAIN) as another:
        assert said(another, "sql") == changed
    assert second.alive


def test_who_runs_with_an_unloaded_adapter_ends_well(
    http: httpx2.Client, gateway: Gateway, adapters: Path
) -> None:
    load(http, adapters / "allowed" / "one")
    sdk = openai.OpenAI(base_url=gateway.url, api_key=PLAIN, max_retries=0)
    stream = sdk.chat.completions.create(
        model="sql", messages=CHAT["messages"], stream=True, max_tokens=200, extra_body={"ignore_eos": True}
    )
    next(stream)
    answer = http.post("/unload_lora_adapter", json={"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert [*stream][-1].choices[0].finish_reason == "length"
    gone = http.post("/chat/completions", json={**CHAT, "model": "sql"})
    assert refused(gone)[:2] == (404, "model")
    assert refused(http.post("/unload_lora_adapter", json={"lora_name": "sql", "lora_int_id": 1})) == (
        404,
        "lora_name",
        "The lora adapter 'sql' cannot be found.",
    )


def test_what_is_refused_names_the_field_and_the_setting(http: httpx2.Client, adapters: Path) -> None:
    one = adapters / "allowed" / "one"
    status, field, why = refused(load(http, adapters / "elsewhere" / "two"))
    assert (status, field) == (400, "lora_path")
    assert "PETIOLE_LORA_FILES" in why
    assert refused(load(http, adapters / "allowed" / "empty"))[:2] == (400, "lora_path")
    assert refused(load(http, one, name="petiole-tiny"))[:2] == (400, "lora_name")
    assert refused(load(http, one, base_model_name="other"))[:2] == (400, "base_model_name")
    assert load(http, one, base_model_name="petiole-tiny").status_code == 200
    status, field, why = refused(load(http, one))
    assert (status, field) == (400, "lora_name")
    assert "has already been loaded" in why
    assert load(http, one, load_inplace=True).status_code == 200


def test_a_right_of_its_own_is_needed(http: httpx2.Client, gateway: Gateway, adapters: Path) -> None:
    one = adapters / "allowed" / "one"
    with client(gateway, PLAIN) as plain, client(gateway, "few") as few:
        for answer in (load(plain, one), plain.post("/unload_lora_adapter", json={"lora_name": "sql"})):
            assert answer.status_code == 403
            assert "--rights adapters" in answer.text
        assert refused(load(few, one))[:2] == (400, "lora_name")
        load(http, one)
        assert refused(few.post("/unload_lora_adapter", json={"lora_name": "sql"}))[0] == 404


def test_only_the_tenant_that_loaded_an_adapter_or_an_admin_changes_it(
    http: httpx2.Client, gateway: Gateway, site: Site, adapters: Path
) -> None:
    one = adapters / "allowed" / "one"
    assert load(http, one).status_code == 200
    with client(gateway, "other") as other, client(gateway, "chief") as chief:
        assert said(other, "sql"), "it is every tenant's that may ask for the name"
        for answer in (
            load(other, one, load_inplace=True),
            other.post("/unload_lora_adapter", json={"lora_name": "sql"}),
        ):
            status, field, why = refused(answer)
            assert (status, field) == (403, "lora_name")
            assert "loaded by another tenant" in why
        assert load(chief, one, load_inplace=True).status_code == 200
        assert json.loads(site.redis.hget(ADAPTERS_KEY, "sql"))["tenant"] == "acme", "it stays its owner's"
        assert http.post("/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200


def test_names_are_one_space_for_all_callers(gateway: Gateway, http: httpx2.Client, adapters: Path) -> None:
    """Also for a tenant that sees another queue alone."""
    one = adapters / "allowed" / "one"
    with client(gateway, "apart") as apart:
        assert refused(load(apart, one, name="petiole-tiny")) == (
            400,
            "lora_name",
            "lora_name: 'petiole-tiny' is the name of a model",
        )
        assert refused(load(apart, one, name="served"))[:2] == (400, "lora_name")


def test_an_adapter_of_the_settings_is_changed_by_them_alone(http: httpx2.Client, adapters: Path) -> None:
    one = adapters / "allowed" / "one"
    for answer in (
        load(http, one, name="served", load_inplace=True),
        http.post("/unload_lora_adapter", json={"lora_name": "served"}),
    ):
        status, field, why = refused(answer)
        assert (status, field) == (400, "lora_name")
        assert "PETIOLE_SERVED_ADAPTERS" in why
        assert "'served'" in why


def test_names_are_few_and_plain(http: httpx2.Client, site: Site, adapters: Path) -> None:
    one = adapters / "allowed" / "one"
    for name in ("", "a b", "a\n", "a\0b", "\u202ea", "-a", "a" * 257):
        assert refused(load(http, one, name=name))[:2] == (400, "lora_name"), name
    stored = LoadedAdapter(path=str(one), model="petiole-tiny", tenant="acme").model_dump_json()
    site.redis.hset(ADAPTERS_KEY, mapping={f"many-{number}": stored for number in range(MOST)})
    status, field, why = refused(load(http, one))
    assert (status, field) == (400, "lora_name")
    assert f"at most {MOST} adapters" in why
    assert "got 'sql'" in why
    assert load(http, one, name="many-1", load_inplace=True).status_code == 200

"""The Redis user of docs/gateway.md can do what a request needs, and Redis refuses it nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.support.rights import BINARIES, SECRET, binary_of, grant, grant_gateway
from tests.support.site import REPOSITORY, RedisServer
from tests.support.trials import rest

ASKED = """
import asyncio
from petiole.gateway.core.caller import ANYBODY, Caller, Limits, ClientRequest, Tenant, as_caller
from petiole.gateway.core.task_plan import TaskCall, Plan
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.serving import generations, records
from petiole.gateway.serving.auth import api_keys, idempotency, manage, rate_limits
from petiole.gateway.serving.webhooks.budget_watch import BudgetWatch

most = Limits(requests=9, input_tokens=10**6, output_tokens=10**6, concurrent=2)
tenant = Caller("acme", "key", Tenant(salt="secret", limits=most), most)

def plan(name):
    known = {"kind": "text_completion", "created": 0, "model": "m", "queue": "petiole", "readers": True}
    record = RequestRecord(id=name, tasks=[name], **known)
    return Plan(record, [TaskCall("generate", {"prompt": "x", "max_tokens": 1})])

async def ask():
    for number in range(6):
        who, name = (ANYBODY, tenant)[number % 2], f"cmpl-{number}"
        with as_caller(who, ClientRequest("/v1/completions", idempotency_key=name)):
            generation = await generations.begin(plan(name))
            assert (await records.get(name, "text_completion")).id == name
            again = await generations.begin(plan(name + "-again"))
            assert again.record.id == name
            await again.aclose()
            await generation.aclose()
            await idempotency.forget(name)
            await rate_limits.release(generation.record)

async def look():
    assert (await api_keys.tenant("of-a-token", new=True)).salt
    await BudgetWatch(print).look()
    await BudgetWatch(print).look()

asyncio.run(ask())
key, _ = manage.add("operators", {}, {"day_tokens": 1}, {}, {"rights": ["admin"]})
manage.change_tenant("globex", {"priority": 1}, {}, make=True)
manage.change_key(key, {"note": "x"}, {})
manage.webhook("globex", "https://a.example/")
assert manage.listed()
asyncio.run(look())
manage.revoke(key)
print("all of it")
"""


@pytest.mark.parametrize("which", rest(BINARIES))
def test_a_gateway_can_do_its_work(which: str, tmp_path: Path) -> None:
    binary = binary_of(which) or pytest.skip(f"{which}: there is none here")
    server = RedisServer(tmp_path, binary=binary)
    try:
        with redis.Redis(unix_socket_path=str(server.socket)) as client:
            grant(client)
            grant_gateway(client)
            url = f"redis+socket://gateway:{SECRET}@{server.socket}?virtual_host=0"
            ran = subprocess.run(
                [sys.executable, "-c", ASKED],
                env={**os.environ, "PETIOLE_BROKER_URL": url},
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                check=False,
            )
            assert "all of it" in ran.stdout, ran.stderr[-3000:]
            assert client.llen("petiole") == 6
            refused = [f"{entry['reason']} {entry['object']}" for entry in client.acl_log()]
            assert refused == []
    finally:
        server.kill()

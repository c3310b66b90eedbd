"""What keys, limits and the ledger of usage add to a request: a gateway with them, in turns with one without.

Both answer whole requests of one token. The clocks are those of the two gateways' processes and of Redis, which
runs the script of the limits and writes the ledger. What a worker does for the ledger is timed alone: beside an
engine no clock would show it."""

from __future__ import annotations

import json
import statistics
import time

from bench.gateway.served import KEY, PROMPT, Client, Served, median
from bench.harness.report import Report

TOGETHER_MS = 0.3
A_ROUND = 10
ASKED = {"model": "petiole-tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}


def keys() -> str:
    """A key whose limits are all counted, and never met."""
    from petiole.gateway.serving.auth.api_keys import digest_of

    limits = {"requests": 10**9, "input_tokens": 10**9, "output_tokens": 10**9, "concurrent": 10**6}
    tenants = {"bench": {"salt": "bench", "limits": limits}}
    return json.dumps({"tenants": tenants, "keys": {digest_of(KEY): {"tenant": "bench", "limits": limits}}})


async def measure(report: Report, without: Served, with_them: Served, rounds: int) -> None:
    sides = [(Client(one.address), one, list[float](), list[float]()) for one in (without, with_them)]
    for client, _, _, _ in sides:
        await client.connect()
    for number in range(rounds + 1):
        for client, gateway, gateway_ms, redis_ms in sides:
            began, of_redis = gateway.cpu_s, redis_s()
            for _ in range(A_ROUND):
                client.ask("POST", "/v1/completions", ASKED)
                await client.answer()
            if number:  # the first is no figure
                gateway_ms.append((gateway.cpu_s - began) / A_ROUND * 1e3)
                redis_ms.append((redis_s() - of_redis) / A_ROUND * 1e3)
    for client, _, _, _ in sides:
        await client.aclose()
    together = added(report, "the gateway", sides[0][2], sides[1][2])
    together += added(report, "Redis", sides[0][3], sides[1][3])
    together += median(report, "an entry of the ledger: processor time of a worker", "ms", entries_ms(10 * rounds))
    report.add("keys, limits and the ledger together", together, "ms", target=TOGETHER_MS, better="lower")


def added(report: Report, whose: str, without: list[float], with_them: list[float]) -> float:
    median(report, f"one token without keys: processor time of {whose}", "ms", without)
    median(report, f"one token with a key and limits: processor time of {whose}", "ms", with_them)
    more = max(0.0, statistics.median(one - other for one, other in zip(with_them, without, strict=True)))
    report.add("  added by them", more, "ms", better="lower")
    return more


def redis_s() -> float:
    """Processor seconds of Redis so far."""
    from petiole.tasks.servers import connections

    told = connections.streams().info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def entries_ms(n: int) -> list[float]:
    """What an outbox makes of each end for the ledger."""
    from petiole.tasks.wire.headers import Account
    from petiole.tasks.wire.keys import HELD_HEADER, TENANT_HEADER
    from petiole.tasks.wire.record.ledger import entry, keys_of

    message = {TENANT_HEADER: "bench", HELD_HEADER: ["3f9a0c61d2be", 4, 1, 352_000_000]}
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "cached_prompt_tokens": 8}
    taken = list[float]()
    for number in range(n):
        began = time.process_time()
        account = Account.of(message, model="petiole-tiny")
        keys_of(account, time.time())
        entry(account, f"cmpl-{number:032x}", 1, {"finish_reason": "length", "usage": usage}, 1, 12, time.time())
        taken.append((time.process_time() - began) * 1e3)
    return taken

"""Constraints of every shape through HTTP and a real worker: each is served or refused by name, and neither the
gateway nor the worker ends.

`PETIOLE_FUZZ_SEED` repeats a run, `PETIOLE_FUZZ_CONSTRAINTS` sets the number."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from tests.gpu_worker.constraints.shapes import CHOICES, EXPRESSIONS, GRAMMARS, SCHEMAS, random_schema
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

CONSTRAINTS = int(os.environ.get("PETIOLE_FUZZ_CONSTRAINTS", "40"))
SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(1, 2**31))
if "CI" in os.environ:
    SEED = 1
KINDS = {"json": SCHEMAS, "grammar": GRAMMARS, "regex": EXPRESSIONS, "choice": CHOICES}
ANSWERS = {200, 400, 413}


def constraint(rng: random.Random) -> tuple[str, str, Any]:
    """What it is called here, its option of `structured_outputs`, and its value."""
    if rng.random() < 0.7:
        schema = random_schema(rng)
        if isinstance(schema, dict):
            schema["$defs"] = {"x": random_schema(rng, 2), "y": random_schema(rng, 2)}
        kind, value = rng.choice([("json", schema), ("grammar", f'start: "a" | %json {json.dumps(schema)}')])
        return f"random {kind}", kind, value
    kind = rng.choice([*KINDS])
    name = rng.choice([*KINDS[kind]])
    make, most = KINDS[kind][name]
    size = int(2 ** rng.uniform(0, most.bit_length())) if rng.random() < 0.9 else most
    return f"{kind}: {name}, {size}", kind, make(min(size, most))


def body(rng: random.Random, kind: str, value: Any) -> dict[str, Any]:
    asked = {"model": "petiole-tiny", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 3}
    if kind == "json" and rng.random() < 0.5:
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}
        return {**asked, "response_format": named}
    return {**asked, "structured_outputs": {kind: value}}


def test_constraints_over_http_are_served_or_refused_by_name(site: Site, gateway: Gateway) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_CONSTRAINTS={CONSTRAINTS}")
    answers, [worker] = Counter[int](), site.workers
    with httpx2.Client(base_url=gateway.root, timeout=300) as http, ThreadPoolExecutor(2) as pool:

        def ask(number: int) -> None:
            rng = random.Random(f"{SEED} {number}")
            name, kind, value = constraint(rng)
            asked = body(rng, kind, value)

            def answered() -> httpx2.Response | None:
                """A machine that is busy enough takes a worker for dead."""
                assert worker.alive(), (SEED, number, name, worker.output[-3000:])
                found = http.post("/v1/chat/completions", json=asked)
                return None if found.status_code == 503 else found

            answer = eventually(answered, f"{SEED}, {number}, {name}: an answer")
            told = answer.json()
            assert answer.status_code in ANSWERS, (SEED, number, name, told)
            assert answer.status_code == 200 or len(told["error"]["message"]) < 1500, (SEED, number, name, told)
            assert worker.alive(), (SEED, number, name, worker.output[-3000:])
            answers[answer.status_code] += 1
            if number % 100 == 99:
                print(f"{number + 1}: {dict(answers)}, {worker.memory_bytes() >> 20} MiB", flush=True)

        [*pool.map(ask, range(CONSTRAINTS))]
    print(f"{CONSTRAINTS} constraints: {dict(answers)}")
    assert {200, 400} <= {*answers}

"""A worker dies behind any token of a task that decodes coordinates: the next attempt continues bin for bin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from petiole.contract.requests.generation import GenerateRequest
from petiole.contract.requests.validation import validate
from petiole.gpu_worker import Delta, Engine, Request
from petiole.tasks.worker.generation.engine_requests import engine_request
from petiole.tasks.worker.output.publisher import Publisher
from tests.support.publishing import TASK, attempt, begin
from tests.support.toy_decoder import value_runtime
from tests.support.toy_engine import toy_engine

N = 14


def run(engine: Engine, request: Request) -> list[Delta]:
    deltas: list[Delta] = []
    engine.submit(request, on_delta=lambda _, delta: deltas.append(delta)).result(timeout=60)
    return deltas


def test_an_attempt_continues_from_the_bins_in_the_log(
    publisher: Publisher, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"prompt": [26, 9, 2], "max_tokens": N, "temperature": 0.0, "ignore_eos": True}
    task: Any = validate(GenerateRequest, options)
    machine: dict[str, Any] = {"max_num_seqs": 4, "num_pages": 200, "stream_interval_ms": 0}
    with toy_engine(runtime=value_runtime(tmp_path, monkeypatch, **machine), text=False, **machine) as engine:
        whole = run(engine, engine_request(TASK, task))
        tokens = [token for delta in whole for token in delta.token_ids]
        bins = [one for delta in whole for one in delta.bins or ()]
        assert len({len(one) for one in bins}) == 3, "coordinates, sizes and text"
        for killed_after in range(1, len(whole)):
            client.flushall()
            stream, _ = attempt(publisher, client)
            for delta in whole[:killed_after]:
                stream.push(delta)
            publisher.flush([stream])
            written = begin(client).written
            resumed = engine_request(
                TASK, task, resume_token_ids=written.token_ids, resume_bins=written.entries("bins")
            )
            rest = run(engine, resumed)
            assert written.token_ids + [token for delta in rest for token in delta.token_ids] == tokens
            known = [tuple(one or ()) for one in written.entries("bins")]
            assert known + [one for delta in rest for one in delta.bins or ()] == bins

"""A Celery worker for text generation as people write it today.

Each task has one prompt, and `worker_prefetch_multiplier` is 1. Either the model is a global of the worker
process, and the task calls transformers' `generate`; or the task only waits for a model server on the same
machine:

    PLAIN_MODEL=folder celery -A bench.peers.workers.plain_celery worker --concurrency 1
    PLAIN_SERVER=http://localhost:PORT celery -A bench.peers.workers.plain_celery worker \\
        --pool threads --concurrency 8

`PLAIN_BROKER` is the Redis of both.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

from celery import Celery
from celery.signals import worker_process_init

BROKER = os.environ.get("PLAIN_BROKER", "redis://localhost:6379/5")

app = Celery("plain", broker=BROKER, backend=BROKER)
app.conf.update(
    worker_prefetch_multiplier=1,
    task_acks_late=True,
    task_default_queue="plain",
    broker_connection_retry_on_startup=True,
)

model: Any = None


@worker_process_init.connect  # type: ignore[untyped-decorator]
def load(**_: object) -> None:
    global model
    import torch
    from transformers import AutoModelForCausalLM

    if threads := int(os.environ.get("PLAIN_THREADS", "0")):
        torch.set_num_threads(threads)
    dtype = getattr(torch, os.environ.get("PLAIN_DTYPE", "bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(os.environ["PLAIN_MODEL"], dtype=dtype)
    model.eval()


@app.task(name="plain.generate")  # type: ignore[untyped-decorator]
def generate(prompt: list[int], max_tokens: int) -> list[int]:
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@app.task(name="plain.ask")  # type: ignore[untyped-decorator]
def ask(prompt: list[int], max_tokens: int) -> list[int]:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(f"{os.environ['PLAIN_SERVER']}/v1/completions", body)
    with urllib.request.urlopen(request) as answer:
        tokens: list[int] = json.load(answer)["token_ids"]
    return tokens

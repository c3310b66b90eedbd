"""`petiole demo`: Petiole end to end on one machine.

Starts an embedded Redis and a Celery worker process, submits eight prompts at once, and shows their eight streams.
The worker is the one of `celery -A tasks worker`, and the streams are read as in a web app.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio  # noqa: F401 - imported here to keep the import out of the TTFT
from celery.result import AsyncResult

import petiole
from petiole import plain
from petiole.contract.errors import shorten
from petiole.contract.results.task_result import GenerationResult
from petiole.tasks import celery_app, chat
from petiole.tasks.commands.terminal import console, is_rich, print_table
from petiole.tasks.errors import PetioleError
from petiole.tasks.servers import embedded
from petiole.tasks.servers._supervisor import die_with
from petiole.tasks.settings import IN_FILES, PREFIX, settings
from petiole.tasks.streams.api import astream

START_TIMEOUT_S = 120.0
DELTA_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
_LOG_LINES = 15


@dataclass
class Prompt:
    """A prompt, its expected answer, and its output so far."""

    skill: str
    prompt: str
    answer: str
    text: str = ""
    error: str = ""
    submitted_at: float = 0.0
    first_at: float = 0.0
    result: GenerationResult | None = None

    @property
    def right(self) -> bool:
        return self.result is not None and self.result.text == self.text and self.text.strip() == self.answer

    @property
    def tokens(self) -> int:
        return self.result.usage.completion_tokens if self.result else 0

    @property
    def tokens_per_s(self) -> float:
        """Decode rate after the first token, from the engine's timing."""
        if self.result is None or self.tokens < 2:
            return 0.0
        timing = self.result.timing
        return 1000 * (self.tokens - 1) / max(1e-3, timing.total_ms - (timing.ttft_ms or 0))


def prompts() -> list[Prompt]:
    """One prompt for each skill of petiole-tiny: see its model card."""
    table = "\n".join(f"7 x {n} = {7 * n}" for n in range(1, 13))
    return [
        Prompt("counting", "Count from 1 to 40.", ", ".join(map(str, range(1, 41)))),
        Prompt("tables", "Multiplication table of 7 up to 12", table),
        Prompt("addition", "What is 17 + 25?", "17 + 25 = 42"),
        Prompt("sorting", "Sort these numbers: 42, 7, 19, 88, 3", "3, 7, 19, 42, 88"),
        Prompt("reversing", "Reverse the word lantern.", "nretnal"),
        Prompt("spelling", "Spell the word garden.", "g-a-r-d-e-n"),
        Prompt(
            "extracting",
            "Extract name, age and city as JSON: Ana is 31 and lives in Lisbon.",
            '{"name": "Ana", "age": 31, "city": "Lisbon"}',
        ),
        Prompt(
            "about itself", "Who are you?", "I am Petiole Tiny, a small language model that ships with Petiole."
        ),
    ]


def main(*, plain: bool = False) -> int:
    """Returns 0 only if every answer is right."""
    began = time.monotonic()
    cases = prompts()
    os.environ.update(environment())
    settings.cache_clear()
    try:
        print("Starting Redis and a worker ...", flush=True)
        with worker():
            print(f"Ready after {time.monotonic() - began:.1f} s. Eight prompts at once:\n", flush=True)
            with view(cases, plain or not is_rich()):
                asyncio.run(run_all(cases))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        embedded.release()
    show_results(cases)
    wrong = [prompt for prompt in cases if not prompt.right]
    for prompt in wrong:
        print(
            f"{prompt.skill}: {prompt.error or f'expected {shorten(prompt.answer)}, got {shorten(prompt.text)}'}"
        )
    print(f"\n{len(cases) - len(wrong)} of {len(cases)} right, in {time.monotonic() - began:.1f} s.")
    return 1 if wrong else 0


def environment() -> dict[str, str]:
    """The demo's settings. It uses a separate queue, because another worker may share the embedded Redis."""
    return {
        **{f"{PREFIX}{name.upper()}_FILE": "" for name in IN_FILES},
        "PETIOLE_BROKER_URL": "embedded://",
        "PETIOLE_REDIS_URL": "",
        "PETIOLE_RESULT_BACKEND": "",
        "PETIOLE_QUEUE": f"petiole-demo-{os.getpid()}",
        "PETIOLE_MODEL": "petiole-tiny",
        "PETIOLE_DRAIN_SECONDS": "0",
    }


@contextlib.contextmanager
def worker(
    name: str = "demo", patience_s: float = START_TIMEOUT_S, /, **given: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a worker and wait until it is ready. Yields its name and process. On Linux it dies with the caller."""
    if settings().broker_url.startswith("embedded:"):
        embedded.socket_path()
    if settings().engine == "vllm":
        patience_s = max(patience_s, settings().vllm_start_s)
    name = f"{name}-{os.getpid()}@localhost"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "petiole", "worker", "--loglevel=INFO", "-n", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the demo handles Ctrl-C and stops the worker
            preexec_fn=die_with(os.getpid()),
            env={**os.environ, **given, "PYTHONPATH": python_path()},
        )
        try:
            wait_until_ready(process, name, log, patience_s)
            yield name, process
        finally:
            stop(process)


def python_path(*more: str) -> str:
    """A PYTHONPATH for subprocesses to import this `petiole` package."""
    here = str(Path(petiole.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [*more, here, os.environ.get("PYTHONPATH")]))


def wait_until_ready(process: subprocess.Popen[bytes], name: str, log: Any, patience_s: float) -> None:
    """A worker replies to a ping once its model is loaded. Raises PetioleError."""
    give_up_at = time.monotonic() + patience_s
    while not celery_app.control.ping(destination=[name], timeout=0.25):
        ended = process.poll() is not None
        if ended or time.monotonic() > give_up_at:
            log.seek(0)
            tail = b"\n".join(log.read().splitlines()[-_LOG_LINES:]).decode(errors="replace")
            why = f"ended with status {process.returncode}" if ended else f"is not ready after {patience_s:.0f} s"
            raise PetioleError(f"the worker {why}; its log ends with:\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def run_all(cases: list[Prompt]) -> None:
    """Submit all prompts, read their streams, and get the results through Celery."""
    submitted = [submit(prompt) for prompt in cases]
    await asyncio.gather(*map(follow, cases, submitted))


def submit(prompt: Prompt) -> AsyncResult:
    prompt.submitted_at = time.monotonic()
    messages = [{"role": "user", "content": prompt.prompt}]
    return chat.delay(messages=messages, temperature=0, max_tokens=512)


async def follow(prompt: Prompt, task: AsyncResult) -> None:
    try:
        async for delta in astream(task, timeout_s=DELTA_TIMEOUT_S):
            prompt.first_at = prompt.first_at or time.monotonic()
            prompt.text += delta.text
        result = await asyncio.to_thread(task.get, timeout=DELTA_TIMEOUT_S)
        prompt.result = GenerationResult.model_validate(result)
    except Exception as error:  # shown as this prompt's answer
        prompt.error = f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def view(cases: list[Prompt], plain: bool) -> Iterator[None]:
    """Show the streams live; as plain text, print them when all have ended."""
    if plain:
        yield
        for prompt in cases:
            print(f"[{prompt.skill}] {prompt.prompt}\n{prompt.text.strip()}\n")
        return
    from rich.live import Live

    with Live(get_renderable=lambda: panels(cases), console=console(), refresh_per_second=20, transient=False):
        yield


def panels(cases: list[Prompt], columns: int = 2, lines: int = 4) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    cells = []
    for prompt in cases:
        tail = "\n".join(plain.text(prompt.text).strip().splitlines()[-lines:])
        colour = "green" if prompt.right else "red" if prompt.error or prompt.result else "blue"
        title = Text(f"{prompt.skill}: {prompt.prompt}", overflow="ellipsis", no_wrap=True)
        cells.append(Panel(Text(tail), title=title, title_align="left", height=lines + 2, border_style=colour))
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    return grid


def show_results(cases: list[Prompt]) -> None:
    rows = [
        (
            prompt.skill,
            f"{(prompt.first_at - prompt.submitted_at) * 1000:.0f} ms" if prompt.first_at else "",
            str(prompt.tokens),
            f"{prompt.tokens_per_s:.0f}",
            prompt.result.finish_reason if prompt.result else "",
            _one_line(prompt.result.text.strip()) if prompt.result else "",
            "right" if prompt.right else "WRONG",
        )
        for prompt in cases
    ]
    print("\nFrom the result backend:")
    print_table(("skill", "TTFT", "tokens", "tokens/s", "finish", "result", ""), rows)


def _one_line(text: str, width: int = 44) -> str:
    joined = " / ".join(text.splitlines())
    return joined if len(joined) <= width else f"{joined[: width - 1]}…"

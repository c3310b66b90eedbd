"""`petiole demo`: submits eight prompts at once, and shows their eight streams, which are read as in a web app."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis.asyncio  # noqa: F401 - imported here to keep the import out of the TTFT
from celery.result import AsyncResult

from petiole import plain
from petiole.contract.errors import shorten
from petiole.contract.results.task_result import GenerationResult
from petiole.tasks import chat
from petiole.tasks.commands.demos.demo import DELTA_TIMEOUT_S, running
from petiole.tasks.commands.terminal import console, is_rich, print_table
from petiole.tasks.streams.api import astream


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
    with running("petiole-tiny"):
        print("Eight prompts at once:\n", flush=True)
        with view(cases, plain or not is_rich()):
            asyncio.run(run_all(cases))
    show_results(cases)
    wrong = [prompt for prompt in cases if not prompt.right]
    for prompt in wrong:
        print(
            f"{prompt.skill}: {prompt.error or f'expected {shorten(prompt.answer)}, got {shorten(prompt.text)}'}"
        )
    print(f"\n{len(cases) - len(wrong)} of {len(cases)} right, in {time.monotonic() - began:.1f} s.")
    return 1 if wrong else 0


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

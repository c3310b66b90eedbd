"""Writes the recording at the top of README from a real run: `python -m docs.recording`.

Two workers of petiole-tiny on an embedded Redis, three readers. The worker that writes the three answers is killed
with SIGKILL in mid-sentence; the other one goes on. The picture shows what the readers got and when, in the colour
of the worker that wrote it. Without animation (`prefers-reduced-motion`) it shows the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

RECORDING = Path(__file__).parent / "images" / "demo.svg"
FROM_TO = ((1, 40), (21, 60), (60, 99))
PROMPTS = [f"Count from {first} to {last}." for first, last in FROM_TO]
ANSWERS = [", ".join(map(str, range(first, last + 1))) for first, last in FROM_TO]
KILL_AFTER = 60
"""Letters of the first answer."""
PATIENCE_S = 120.0
TRIES = 5

COLUMNS, LINE, LETTER = 88, 20, 8.4
"""Letters a line, pixels a line, and pixels a letter of a monospaced font of 14 pixels."""
SLOWER = 3
"""How many times slower the recording is played: petiole-tiny writes faster than people read."""
STILL_S = 3.0
"""How long the end is shown before the recording begins anew."""
COLOURS = {1: "#7aa2f7", 2: "#9ece6a"}
"""By attempt: the killed worker's, the next one's."""


@dataclass(frozen=True)
class Heard:
    """What a reader got: seconds after the first one, which reader, which attempt wrote it."""

    at_s: float
    reader: int
    attempt: int
    text: str


@dataclass(frozen=True)
class Run:
    killed_at_s: float
    heard: Sequence[Heard]

    def answer(self, reader: int) -> str:
        return "".join(one.text for one in self.heard if one.reader == reader)

    @property
    def is_interrupted(self) -> bool:
        """Whether each answer was begun by one worker and ended by the other."""
        return all({1, 2} == {one.attempt for one in self.heard if one.reader == n} for n in range(len(PROMPTS)))

    @property
    def first_at_s(self) -> float:
        """When the second worker's first token came."""
        return min(one.at_s for one in self.heard if one.attempt == 2)


def record() -> Run:
    """Raises RuntimeError if no run in `TRIES` was interrupted in all of its answers."""
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.servers import embedded
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    settings.cache_clear()
    try:
        for _ in range(TRIES):
            with ExitStack() as stack:
                (first, process), (second, _) = (
                    stack.enter_context(demo.worker(name)) for name in ("first", "second")
                )
                run = asyncio.run(follow(first, process.kill, second))
            if run.is_interrupted:
                return run
    finally:
        embedded.release()
    raise RuntimeError(f"no run of {TRIES} was interrupted: the answers are too short for this machine")


async def follow(first: str, kill: Callable[[], None], second: str) -> Run:
    """Only the first worker takes tasks until the readers have begun to read."""
    from petiole.tasks import celery_app, chat, settings

    queue = settings.settings().queue
    await asyncio.to_thread(celery_app.control.cancel_consumer, queue, destination=[second], reply=True)
    heard: list[Heard] = []
    ended: list[float] = []
    began = 0.0

    async def read(reader: int) -> None:
        nonlocal began
        said = {"role": "user", "content": PROMPTS[reader]}
        async for delta in chat.astream(messages=[said], temperature=0, max_tokens=512, timeout_s=PATIENCE_S):
            now = time.perf_counter()
            began = began or now
            heard.append(Heard(round(now - began, 2), reader, min(delta.attempt, 2), delta.text))
            if not ended and reader == 0 and sum(len(one.text) for one in heard if not one.reader) > KILL_AFTER:
                celery_app.control.add_consumer(queue, destination=[second], reply=False)
                kill()
                ended.append(now - began)

    await asyncio.gather(*map(read, range(len(PROMPTS))))
    run = Run(round(ended[0], 2), heard)
    assert [run.answer(n).strip() for n in range(len(PROMPTS))] == ANSWERS, "an answer is not whole"
    return run


# ---------------------------------------------------------------- the picture


def svg(run: Run) -> str:
    length_s = max(one.at_s for one in run.heard) * SLOWER + STILL_S
    moments: dict[float, str] = {}
    texts: list[str] = []

    def say(column: float, line: float, text: str, colour: str, at_s: float | None = None) -> None:
        """Text that appears at a moment of the run; without one it is always there."""
        name = "" if at_s is None else moments.setdefault(at_s, f"t{len(moments)}")
        appears = f' class="{name}"' if name else ""
        x, y = 16 + column * LETTER, LINE * (line + 1.4)
        texts.append(f'<text x="{x:g}" y="{y:g}" fill="{colour}"{appears}>{escape(text)}</text>')

    def bar(line: float, label: str, attempt: int) -> None:
        say(0, line, "●", COLOURS[attempt])
        say(2, line, label, "#c0caf5")

    bar(0, "celery -A petiole worker -n first", 1)
    say(38, 0, "killed with SIGKILL in mid-sentence", "#f7768e", run.killed_at_s)
    bar(1, "celery -A petiole worker -n second", 2)
    waited_s = run.first_at_s - run.killed_at_s
    say(38, 1, f"goes on {waited_s:.1f} s later, at the next token", COLOURS[2], run.first_at_s)
    say(66, 2, f"played {SLOWER} times slower", "#565f89")
    line = 3.0
    for reader, prompt in enumerate(PROMPTS):
        say(0, line, f"chat: {prompt}", "#565f89")
        at = 0
        for one in (one for one in run.heard if one.reader == reader and one.text):
            for _, part in groupby(enumerate(one.text, at), lambda pair: pair[0] // COLUMNS):
                letters = list(part)
                row, column = divmod(letters[0][0], COLUMNS)
                said = "".join(letter for _, letter in letters)
                if indent := len(said) - len(said.lstrip()):  # leading blanks are not drawn
                    said, column = said.lstrip(), column + indent
                if said:
                    say(column, line + 1 + row, said, COLOURS[one.attempt], one.at_s)
            at += len(one.text)
        line += 2.5 + (at - 1) // COLUMNS
    height = LINE * (line + 0.6)
    width = 32 + COLUMNS * LETTER
    parts = {name: 100 * at_s * SLOWER / length_s + 0.5 for at_s, name in moments.items()}
    frames = "".join(
        f"@keyframes {name}{{0%,{part:.2f}%{{opacity:0}}{part + 0.01:.2f}%,100%{{opacity:1}}}}"
        f".{name}{{animation:{name} {length_s:.1f}s infinite}}"
        for name, part in parts.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        "<title>Three answers stream from one worker. It is killed, and another one goes on at the next token."
        "</title>\n"
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}\n"
        f"@media (prefers-reduced-motion:no-preference){{{frames}}}</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#1a1b26"/>\n' + "\n".join(texts) + "\n</svg>\n"
    )


def main() -> int:
    run = record()
    RECORDING.write_text(svg(run))
    print(f"killed after {run.killed_at_s} s; the next token after {run.first_at_s} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

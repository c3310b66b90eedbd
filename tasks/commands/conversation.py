"""`petiole chat`: a conversation in the terminal, through the queue like any other task.

Each turn submits the whole history and prints the answer while it arrives. Ctrl-C during an answer cancels the
answer; its text so far stays in the history. Ctrl-C at the prompt drops the line. Ctrl-D ends the program."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import redis
from celery.exceptions import CeleryError
from kombu.exceptions import OperationalError

from petiole.tasks.errors import PetioleError
from petiole.tasks.fleet import control
from petiole.tasks.settings import settings
from petiole.tasks.submission.definitions import chat

HELP = "/reset begins a new conversation, /help shows this, Ctrl-C cancels an answer, Ctrl-D leaves"
ENDED_WITHIN_S = 10.0
"""How long to wait for the figures of an answer after its stream has ended, or until it is cancelled."""
LOOK_S = 1.0
"""How long the wait for the next piece may go on after Ctrl-C."""
SHORTEST_S = 0.01
"""Tokens that arrived within less time have no rate."""

FAILURES = (PetioleError, OperationalError, CeleryError, redis.RedisError, OSError)


class Conversation:
    """The history, and one turn at a time."""

    def __init__(self, system: str | None, options: dict[str, Any]) -> None:
        self._system, self._options = system, options
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def turn(self, text: str) -> None:
        """Ask, and print the answer and its figures. A turn that fails leaves the history as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = LiveAnswer(asked, self._options)
        with first_ctrl_c(answer.cancel):
            try:
                for piece in answer.read():
                    print(piece, end="", flush=True)
            finally:
                print()
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
            print(answer.figures(), file=sys.stderr, flush=True)


@contextlib.contextmanager
def first_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `act`, and interrupts nothing: an exception out of nowhere may leave any library half
    done. The next one raises KeyboardInterrupt, as usual."""
    usual = signal.getsignal(signal.SIGINT)

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        act()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


class LiveAnswer:
    """One answer, as it arrives."""

    def __init__(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
        self._messages, self._options = messages, options
        self._task_id = str(uuid.uuid4())  # known before the task is submitted, so it can be cancelled at any time
        self._cancelled: Future[None] | None = None
        self._result: Any = None
        self._asked_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._asked_at
        self.text, self.tokens = "", 0

    def read(self) -> Iterator[str]:
        """Ask. The pieces of text, as they arrive, until it is cancelled."""
        options = {"heartbeat_s": LOOK_S, **self._options, "task_id": self._task_id}
        with chat.stream(messages=self._messages, **options) as deltas:
            self._result = deltas.result
            for delta in deltas:
                if not delta.is_heartbeat:
                    self._last_at = time.monotonic()
                    self._first_at = self._first_at or self._last_at
                    self.text += delta.text
                    self.tokens += len(delta.token_ids)
                    yield delta.text
                if self._cancelled is not None:
                    return

    def cancel(self) -> None:
        """Cancel the task, on a thread of its own, because it may wait for a server."""
        threads = ThreadPoolExecutor(1, "petiole-cancel")
        self._cancelled = threads.submit(control.cancel, self._task_id)
        threads.shutdown(wait=False)

    def figures(self) -> str:
        """A line such as `12 tokens, the first after 0.21 s, 38.2 a second; prompt 40 tokens, 32 of them cached`.

        Raises the error that has kept the task from being cancelled."""
        parts = [f"{self.tokens} tokens"]
        if self._first_at is not None:
            parts.append(f"the first after {self._first_at - self._asked_at:.2f} s")
            if self._last_at - self._first_at > SHORTEST_S:
                parts.append(f"{(self.tokens - 1) / (self._last_at - self._first_at):.1f} a second")
        if self._cancelled is not None:
            try:
                self._cancelled.result(ENDED_WITHIN_S)
            except TimeoutError:
                raise TimeoutError(
                    f"not cancelled within {ENDED_WITHIN_S:g} s: a server does not answer"
                ) from None
            return f"[cancelled: {', '.join(parts)}]"
        with contextlib.suppress(*FAILURES):
            result = self._result.get(timeout=ENDED_WITHIN_S)
            usage = result["usage"]
            prompt = f"prompt {usage['prompt_tokens']} tokens, {usage['cached_prompt_tokens']} of them cached"
            return f"[{', '.join(parts)}; {prompt}; {result['finish_reason']}]"
        return f"[{', '.join(parts)}]"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--system", metavar="TEXT", help="the system prompt")
    command.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of tokens of an answer")
    command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    command.add_argument("--seed", type=int, metavar="N", help="which draw")
    command.add_argument("--adapter", metavar="NAME", help="a LoRA adapter: folder or hub id")
    command.add_argument(
        "--queue", metavar="NAME", help="the queue of other workers, such as those of another model"
    )
    command.add_argument("--priority", type=int, metavar="N", help="0, the default, is served first")
    command.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="give up after this many seconds without a delta"
    )
    command.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='any other option of chat, such as top_p=0.9 or stop=["6"]; may be given several times',
    )


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        if not separator or value[:1] in '"[{':
            raise argparse.ArgumentTypeError(f"must be NAME=JSON, got {text!r}") from None
        return name, value  # a word: adapter=mine


def run(given: argparse.Namespace) -> int:
    """The program. With input from a pipe each line is a turn, and the first failure ends it with status 1."""
    settings()  # a wrong one ends the program before the first turn
    named = ("max_tokens", "temperature", "seed", "adapter", "queue", "priority")
    options = {name: value for name in named if (value := getattr(given, name)) is not None}
    conversation = Conversation(given.system, {**options, **dict(given.option), "timeout_s": given.timeout})
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - editing and history in input()
        print(HELP, file=sys.stderr)
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            print(HELP, file=sys.stderr)
        elif text:
            try:
                conversation.turn(text)
            except KeyboardInterrupt:  # the second one: waiting for what the first one began may take long
                continue
            except FAILURES as error:
                print(f"petiole: {error}", file=sys.stderr)
                if not interactive:
                    return 1

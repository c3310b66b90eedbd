"""`petiole chat`: a conversation in the terminal, through the queue like any other task.

Each turn submits the whole history and prints the answer while it arrives. Ctrl-C during an answer cancels the
answer; its text so far stays in the history. Ctrl-C at the prompt drops the line. Ctrl-D ends the program."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import redis
from celery.exceptions import CeleryError
from kombu.exceptions import OperationalError

from petiole.tasks.errors import PetioleError
from petiole.tasks.fleet import control
from petiole.tasks.submission.definitions import chat

HELP = "/reset begins a new conversation, /help shows this, Ctrl-C cancels an answer, Ctrl-D leaves"
ENDED_WITHIN_S = 10.0
"""How long to wait for the figures of an answer after its stream has ended."""

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
        answer = Answer(chat.stream(messages=asked, **self._options))
        try:
            for piece in answer.read():
                print(piece, end="", flush=True)
        except KeyboardInterrupt:  # while the program waits for a piece, or for the terminal to take it
            answer.cancel()
        finally:
            print()
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        print(answer.figures(), file=sys.stderr, flush=True)


class Answer:
    """One answer, as it arrives."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._asked_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._asked_at
        self.text, self.tokens, self.cancelled = "", 0, False

    def read(self) -> Iterator[str]:
        """The pieces of text, as they arrive."""
        with self._reader as deltas:
            for delta in deltas:
                self._last_at = time.monotonic()
                self._first_at = self._first_at or self._last_at
                self.text += delta.text
                self.tokens += len(delta.token_ids)
                yield delta.text

    def cancel(self) -> None:
        self.cancelled = True
        control.cancel(self._reader.task_id)

    def figures(self) -> str:
        """Such as `12 tokens, the first after 0.21 s, 38.2 a second; prompt 40 tokens, 32 of them cached`."""
        parts = [f"{self.tokens} tokens"]
        if self._first_at is not None:
            parts.append(f"the first after {self._first_at - self._asked_at:.2f} s")
            if self.tokens > 1 and self._last_at > self._first_at:
                parts.append(f"{(self.tokens - 1) / (self._last_at - self._first_at):.1f} a second")
        if self.cancelled:
            return f"[cancelled: {', '.join(parts)}]"
        with contextlib.suppress(*FAILURES):
            result = self._reader.result.get(timeout=ENDED_WITHIN_S)
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
            except KeyboardInterrupt:  # interrupted before there was a task to cancel
                continue
            except FAILURES as error:
                print(f"petiole: {error}", file=sys.stderr)
                if not interactive:
                    return 1

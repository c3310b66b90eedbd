"""What the programs in Python share: the gateway and its models, and how their steps are run.

A program's steps are its public functions, asynchronous ones, too, in their order; `resume = lacks("...")` says
why its client has no such step. A step fails if it raises, or if the gateway refuses any of its requests, except
in those that the program's `REFUSED` names, by default `error`.

`petiole-tiny-tools` knows the tools `weather(city)` and `multiply(a, b)`. `scripted` says what it is told to, for
clients whose prompts are too long for the other: `reciting`."""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

URL = sys.argv[1]
ROOT = URL.removesuffix("/v1")
MODEL, SCRIPTED = "petiole-tiny-tools", "scripted"
SHORT = "Count from 1 to 5."
COUNTED = "1, 2, 3, 4, 5"
ABOUT_ANA = "Extract name and age as JSON: Ana is 31."
TOO_LONG = "one two three " * 2000
"""More than the context of petiole-tiny-tools."""

_HEAD = re.compile(r'^# (?:dependencies = \["|npm: )([^"\s]+)', re.M)
_REFUSED = re.compile(r'^petiole_gateway_requests_total\{.*path="(.*?)",status="(?!499)([45]\d\d)"\} (\S+)', re.M)
_PATIENCE_S = 600.0
"""A busy machine is no fault of a client."""


signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background has it ignored


class Lacks(str):
    """Why a client has no such step."""


lacks = Lacks


def reciting(*answers: str) -> str:
    """A question to `scripted`, which it answers with these texts: a text a turn."""
    return f"Recite: {json.dumps(answers)}"


def calling(name: str, /, **arguments: Any) -> str:
    """An answer that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


AFTER_THREE_ROUNDS = "It is 20 degrees everywhere."
THREE_ROUNDS = reciting(*(calling("weather", city=city) for city in ("Rome", "Oslo", "Lima")), AFTER_THREE_ROUNDS)
"""A question whose answer needs three calls, one after the other."""
_ENDLESS = "and so on " * 4000
ENDLESS = reciting(_ENDLESS)
"""A question whose answer nobody waits for."""


def wait_until_idle() -> None:
    """Until no worker generates anything: what a client has left is cancelled."""
    deadline = time.monotonic() + _PATIENCE_S
    while running := json.loads(_read(f"{URL}/fleet"))["generations"]:
        assert time.monotonic() < deadline, running
        time.sleep(0.2)


async def idle() -> None:
    """The same in an asynchronous step, whose client has something to do meanwhile."""
    await asyncio.to_thread(wait_until_idle)


def wait_until_running() -> None:
    """Until a worker generates something."""
    deadline = time.monotonic() + _PATIENCE_S
    while not json.loads(_read(f"{URL}/fleet"))["generations"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


TOO_MANY_TOKENS = "maximum context length is 2048 tokens"


@contextmanager
def refused(*kinds: type[Exception], by: str = "") -> Iterator[None]:
    """What must be refused with such an error, whose text has `by`."""
    text = None
    try:
        yield
    except kinds as error:
        text = str(error)
    assert text is not None, "not refused"
    assert by in text, text


def command(*arguments: str, said: str = "", **environment: str) -> str:
    """What a command of the client prints; its errors, too. `said`: what it reads."""
    return subprocess.run(
        [*arguments], input=said, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=_PATIENCE_S, env=os.environ | environment, check=False,
    ).stdout  # fmt: skip


def interrupted(*arguments: str, said: str = "", **environment: str) -> None:
    """A command that is interrupted in the middle of its first answer, as by Ctrl-C."""
    process = subprocess.Popen(
        [*arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        process.stdin.write(said)
        process.stdin.close()
        wait_until_running()
        process.send_signal(signal.SIGINT)
        wait_until_idle()
        process.terminate()


NUMBERS = ("one", "two", "three")


def writing(tool: str, /, **parameters: Any) -> str:
    """A question whose answer writes three files, one after the other, by a tool for commands. `parameters`: those
    of the tool, with COMMAND where the command stands."""
    lines = [f"echo {number} > {number}.txt" for number in NUMBERS]
    given = json.dumps(parameters)
    calls = [calling(tool, **json.loads(given.replace("COMMAND", line))) for line in lines]
    return reciting(*calls, AFTER_THREE_ROUNDS)


def written() -> bool:
    """Whether the files are there."""
    return [Path(f"{number}.txt").read_text().strip() for number in NUMBERS] == [*NUMBERS]


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def _refused() -> dict[tuple[str, str], float]:
    """By path and status, how many requests the gateway has refused; 499 are those whose client has left."""
    return {(path, status): float(count) for path, status, count in _REFUSED.findall(_read(f"{ROOT}/metrics"))}


def _generated() -> int:
    """The tokens that all workers have generated."""
    return sum(worker["generated_tokens"] for worker in json.loads(_read(f"{URL}/fleet"))["workers"])


def _abort(step: Callable[[], Any]) -> None:
    """`step`, whose answers must end long before all has been said."""
    before = _generated()
    _ran(step, may_be_refused=False)
    asked = {"model": SCRIPTED, "prompt": _ENDLESS}
    request = urllib.request.Request(
        f"{ROOT}/tokenize", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        whole = json.load(answer)["count"]
    assert (more := _generated() - before) < whole, f"{more} tokens, of {whole}"


def _ran(step: Callable[[], Any], may_be_refused: bool) -> None:
    before = _refused()
    made = step()
    if inspect.iscoroutine(made):
        asyncio.run(made)
    new = {which: count for which, count in _refused().items() if count > before.get(which, 0)}
    assert may_be_refused or not new, f"the gateway refused {[*new]}"


def run(program: dict[str, Any]) -> None:
    """All steps of a program, whose `globals()` these are."""
    packages = _HEAD.search(Path(program["__file__"]).read_text())
    assert packages is not None
    client = packages[1].partition("[")[0]
    print(json.dumps({"client": client, "version": _version(client)}), flush=True)
    for name, step in program.items():
        if isinstance(step, Lacks):
            print(json.dumps({"step": name, "lacks": step}), flush=True)
        elif inspect.isfunction(step) and step.__module__ == "__main__" and not name.startswith("_"):
            began = time.monotonic()
            try:
                if name == "abort":
                    _abort(step)
                else:
                    _ran(step, name in program.get("REFUSED", ("error",)))
            except Exception:
                print(json.dumps({"step": name, "failed": traceback.format_exc()}), flush=True)
            else:
                took_s = round(time.monotonic() - began, 1)
                print(json.dumps({"step": name, "took_s": took_s}), flush=True)


def _version(package: str) -> str:
    """Of a package of Python, or of Node beside the program's `node_modules`."""
    node = NODE / package / "package.json"
    if node.exists():
        return str(json.loads(node.read_text())["version"])
    return version(package)


NODE = Path(sys.argv[2] if len(sys.argv) > 2 else ".") / "node_modules"
"""Where the packages of npm are that a program's head names."""

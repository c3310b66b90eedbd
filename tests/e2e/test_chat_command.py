"""`petiole chat`, as it is typed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from petiole.tasks.commands.conversation import first_ctrl_c
from tests.support.site import REPOSITORY, Site, eventually


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as site:
        site.worker()
        yield site


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "petiole.tasks.commands.cli", "chat", *options]


def talk(site: Site, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options),
        env={**os.environ, **site.environment},
        cwd=REPOSITORY,
        input=lines,
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_turn_is_answered_with_the_history_and_its_figures(site: Site) -> None:
    options = ("--system", "Be brief.", "--max-tokens", "4", "--seed", "1", "--option", "top_p=0.9")
    two = talk(site, "hello\nand more\n", *options)
    assert (two.returncode, len(two.stdout.splitlines())) == (0, 2)
    assert two.stderr.count("[4 tokens, the first after ") == 2
    assert two.stderr.count("length]") == 2
    first, second = two.stdout.splitlines()
    afresh = talk(site, "hello\n/reset\nand more\n", *options).stdout.splitlines()
    assert afresh[0] == first
    assert afresh[1] != second, "the history was part of the request"


def test_what_goes_wrong_is_one_line(site: Site) -> None:
    refused = talk(site, "hello\n", "--max-tokens", "0")
    assert (refused.returncode, refused.stdout.strip()) == (1, "")
    assert refused.stderr == "petiole: max_tokens: must be at least 1, got 0\n"
    assert "must be NAME=JSON, got 'top_p'" in talk(site, "", "--option", "top_p").stderr


def test_ctrl_c_cancels_the_answer_and_not_the_program(site: Site, tmp_path: Path) -> None:
    written, said = tmp_path / "out", tmp_path / "err"
    with written.open("w") as out, said.open("w") as err:
        program = subprocess.Popen(
            command("--max-tokens", "4000"),
            env={**os.environ, **site.environment, "PYTHONUNBUFFERED": "1"},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            text=True,
        )
    assert program.stdin is not None
    try:
        for number in (1, 2):
            begun = written.stat().st_size
            program.stdin.write("hello\n")
            program.stdin.flush()
            eventually(lambda begun=begun: written.stat().st_size > begun + 20, "the answer arrives")
            program.send_signal(signal.SIGINT)
            eventually(lambda n=number: said.read_text().count("[cancelled: ") == n, "it is cancelled")
        program.stdin.close()
        assert program.wait(30) == 0
    finally:
        program.kill()
    eventually(lambda: site.unfinished() == 0, "the workers have dropped both")


def test_ctrl_c_cancels_an_answer_that_the_terminal_does_not_take(site: Site, tmp_path: Path) -> None:
    """As after Ctrl-S: the interrupt meets the program while it prints, not while it waits for a piece."""
    terminal, screen = os.pipe()
    room = fcntl.fcntl(screen, fcntl.F_SETPIPE_SZ, 4096)
    said = tmp_path / "err"
    with said.open("w") as err:
        program = subprocess.Popen(
            command("--max-tokens", "4000"),
            env={**os.environ, **site.environment},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=screen,
            stderr=err,
        )
    os.close(screen)
    assert program.stdin is not None
    try:
        program.stdin.write(b"hello\n")
        program.stdin.close()
        waits_in = Path(f"/proc/{program.pid}/wchan")
        eventually(lambda: "pipe_write" in waits_in.read_text(), "it cannot print")
        program.send_signal(signal.SIGINT)
        while os.read(terminal, room):  # up to its end
            pass
        assert "[cancelled: " in said.read_text()
        assert program.wait(30) == 0
    finally:
        program.kill()
        os.close(terminal)
    eventually(lambda: site.unfinished() == 0, "the worker has dropped it")


CANCELLED_BEFORE = """
from petiole.tasks.commands.conversation import LiveAnswer
answer = LiveAnswer([{"role": "user", "content": "hello"}], {"max_tokens": 4000})
answer.cancel()
for _ in answer.read():
    pass
print(answer.figures())
"""


def test_an_answer_can_be_cancelled_before_it_is_submitted(site: Site) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED_BEFORE],
        env={**os.environ, **site.environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("[cancelled: ")
    eventually(lambda: site.unfinished() == 0, "the worker has dropped it", 5)


@pytest.fixture
def usual_ctrl_c() -> Iterator[None]:
    """Where these tests run in the background, a shell may have told them to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
def test_the_first_ctrl_c_acts_and_the_next_one_interrupts() -> None:
    acted = []
    with first_ctrl_c(lambda: acted.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert acted == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert acted == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

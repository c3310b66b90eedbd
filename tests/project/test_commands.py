"""Every shell block of README and docs is run as it is printed: here, by the test that is named beside it, or not,
for a reason. Every command line in them, and in the text, is one that its program takes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest
from celery.bin.celery import celery
from celery.worker.control import Panel
from starlette.routing import BaseRoute, Match, Mount

from bench.__main__ import SHARE, WORKLOADS
from petiole.gateway.http.application import make as make_gateway
from petiole.tasks import settings
from petiole.tasks.commands import cli
from tests.project.test_links import CODE, pages
from tests.support.site import REPOSITORY

yaml = pytest.importorskip("yaml")

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`((?:petiole|make|celery|python -m|docker compose) [^`]+)`")
PAGES = [page for page in pages() if page == "README.md" or page.startswith("docs/")]

SWITCHES = (REPOSITORY / "docs" / "settings.md").read_text().partition("## Switches")[2].partition("\n## ")[0]

HERE: dict[str, tuple[int, ...]] = {"docs/deploying.md": (1,)}
"""By page: the shell blocks that `test_the_blocks_run_as_they_are_printed` runs."""

ELSEWHERE: dict[str, dict[int, str]] = {
    "README.md": {
        0: "tests/project/test_ci.py",
        1: "tests/tasks/commands/test_gateway.py",
        2: "tests/tasks/servers/test_embedded.py",
        3: "tests/tasks/servers/test_embedded.py",
        4: "tests/project/test_wheel.py",
        5: "tests/gateway/http/test_server.py",
        6: "tests/gateway/openai/test_chat.py",
    },
    "docs/batch.md": {
        0: "tests/e2e/test_batch.py",
        1: "tests/e2e/test_batch_from_python.py",
        2: "tests/e2e/test_detached_batch.py",
    },
    "docs/celery.md": {0: "tests/project/test_examples.py"},
    "docs/embeddings.md": {0: "tests/tasks/test_end_to_end.py"},
    "docs/deploying.md": {
        0: "tests/e2e/test_images.py",
        2: "tests/e2e/test_steering.py",
        3: "needs a Redis at its usual port",
    },
    "docs/engines.md": {0: "needs vLLM and several GPUs"},
    "docs/existing-app.md": {
        0: "tests/project/test_wheel.py",
        1: "tests/project/test_wheel.py",
        2: "tests/project/test_wheel.py",
        3: "tests/project/test_wheel.py",
    },
    "docs/gateway.md": {
        0: "tests/gateway/http/test_server.py",
        1: "tests/gateway/test_survival.py",
        2: "tests/gateway/test_keys.py",
        3: "tests/gateway/test_keys.py",
        4: "tests/gateway/openai/responses/test_webhooks.py",
    },
    "docs/maintaining.md": {0: "makes a release's record", 1: "needs a GPU", 2: "needs a GPU"},
    "docs/models.md": {0: "tests/e2e/test_plan_command.py"},
    "docs/monitoring.md": {0: "some of them end when they are stopped"},
    "docs/operations.md": {
        0: "tests/e2e/test_recovery.py",
        1: "needs a cluster",
        2: "tests/deploy/test_systemd.py",
        3: "tests/e2e/test_stories.py",
    },
    "docs/recipes.md": {
        0: "tests/gateway/test_keys.py",
        1: "tests/e2e/test_models.py",
        2: "tests/e2e/test_adapters.py",
        3: "tests/gateway/serving/test_web_tokens.py",
        4: "tests/gateway/test_admin.py",
    },
    "docs/security.md": {0: "tests/e2e/test_rights.py"},
    "docs/settings.md": {0: "tests/e2e/test_sentinel.py"},
    "docs/streams.md": {0: "tests/tasks/streams/test_wire_format.py"},
    "docs/traces.md": {0: "tests/e2e/test_traces.py"},
    "docs/tutorial.md": {
        0: "tests/project/test_wheel.py",
        1: "tests/tasks/servers/test_embedded.py",
        2: "tests/tasks/servers/test_embedded.py",
        3: "tests/e2e/test_applications.py",
        4: "needs a model from the hub",
        5: "needs a model from the hub",
        6: "tests/tasks/servers/test_embedded.py",
        7: "tests/e2e/test_recovery.py",
    },
    "docs/vision.md": {0: "tests/tasks/commands/test_vision_demo.py"},
}
"""By page: the tests that run the other blocks, or the same commands; or why nothing here can."""


@cache
def blocks(page: str) -> list[str]:
    return [text for language, text in BLOCK.findall((REPOSITORY / page).read_text()) if language == "sh"]


def commands(block: str) -> list[list[str]]:
    """The words of each command line, without comments."""
    lines = block.replace("\\\n", " ").split("\n")
    return [words for line in lines if (words := shlex.split(line, comments=True))]


# ---------------------------------------------------------------- what programs take


def check(words: Sequence[str], page: str) -> None:
    """Raises AssertionError unless the program takes these words."""
    words = [word for word in words if word != "&"]
    while words and (assigned := re.fullmatch(r"(\w+)=.*", words[0])):
        check_variable(assigned[1])
        words = words[1:]
    if words:
        name = words[0].rpartition("/")[2]
        assert name in PROGRAMS, f"nothing here knows the program {words[0]!r}"
        PROGRAMS[name](words[1:], page)


def check_variable(name: str) -> None:
    known = {*settings.Settings.model_fields, *(f"{field}_file" for field in settings.IN_FILES)}
    field = name.removeprefix(settings.PREFIX)
    assert field == name or field.lower() in known or f"`{name}`" in SWITCHES, f"{name} is no setting"


def export(words: Sequence[str], page: str) -> None:
    for word in words:
        check_variable(word.partition("=")[0])


def petiole(words: Sequence[str], page: str) -> None:
    if words[:1] == ["bench"]:
        assert {word for word in words[1:] if re.fullmatch(r"[a-z_]+", word)} <= {*WORKLOADS, SHARE}
        return
    said = io.StringIO()
    refused = contextlib.suppress(SystemExit)
    with refused, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        cli.parser().parse_args(list(words))
        return
    raise AssertionError(said.getvalue())


def check_celery(words: Sequence[str], page: str) -> None:
    """By click's own parsers: a context would load the app."""
    if not (left := parsed(celery, words)):
        return  # its options alone
    name, *rest = left
    command = celery.get_command(click.Context(celery), name)
    assert command is not None, name
    parsed(command, rest)
    if name in ("inspect", "control") and rest:
        assert rest[0] in Panel.meta or rest[0] in ENGINE_COMMANDS, rest[0]


ENGINE_COMMANDS = ("pause_engine", "resume_engine", "reload_engine", "engine_state")


def parsed(command: click.Command, words: Sequence[str]) -> list[str]:
    """What is left of the words without the command's options and arguments."""
    context = click.Context(command, allow_interspersed_args=command is not celery)
    _, rest, _ = command.make_parser(context).parse_args(list(words))
    return rest


def make(words: Sequence[str], page: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


def pip(words: Sequence[str], page: str) -> None:
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.findall(r"(?:petiole|checkout)\[([\w,]+)\]", " ".join(words))
    assert {extra for extras in wanted for extra in extras.split(",")} <= set(known)


def python(words: Sequence[str], page: str) -> None:
    if words[0].endswith(".py"):
        assert (REPOSITORY / words[0]).exists() or (REPOSITORY / "examples" / Path(words[0]).name).exists()
        return
    assert words[0] == "-m"
    module, rest = words[1], words[2:]
    if module in ("venv", "pytest"):
        paths = [word for word in rest if word.startswith("tests/")]
        assert [path for path in paths if not (REPOSITORY / path).exists()] == []
        return
    found = importlib.util.find_spec(module)
    assert found is not None, module
    program = f"{module}.__main__" if found.submodule_search_locations else module
    source = "".join(sources(program).values())
    options = [word for word in rest if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in source] == []


def sources(module: str, found: dict[str, str] | None = None) -> dict[str, str]:
    """The text of a module, and of what it imports of its own package."""
    found = {} if found is None else found
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    found[module] = Path(spec.origin).read_text()
    for at, names in re.findall(rf"^from ({module.partition('.')[0]}[\w.]*) import (.*)", found[module], re.M):
        inner = [f"{at}.{name}" for name in names.split(", ") if (REPOSITORY / at.replace(".", "/")).is_dir()]
        for one in inner or [at]:
            if one not in found and importlib.util.find_spec(one) is not None:
                sources(one, found)
    return found


def docker(words: Sequence[str], page: str) -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    rest = list(words[1:])
    if rest[:1] == ["--profile"]:
        assert rest[1] in profiles
        rest = rest[2:]
    if rest[0] == "run":
        service, *inner = [word for word in rest[1:] if not word.startswith("--")]
        assert service in services
        check(inner, page)
    else:
        assert rest[0] in ("build", "up"), rest


def curl(words: Sequence[str], page: str) -> None:
    """A route of the gateway, or one of an example on the page."""
    url = next(word for word in words if "/" in word and not word.startswith(("Content-Type", "{")))
    parts = urlsplit(url if "//" in url else f"//{url}")
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if "-d" in words else "GET"
    example = re.sub(r"/ID(?=/|$)", "/{task_id}", parts.path)
    if f'@app.{method.lower()}("{example}")' in (REPOSITORY / page).read_text():
        return
    scope: dict[str, object] = {
        "type": "http",
        "path": parts.path,
        "method": method,
        "headers": [],
        "root_path": "",
    }
    assert leads_somewhere(make_gateway().routes, scope), (method, parts.path)


def leads_somewhere(routes: Sequence[BaseRoute], scope: dict[str, object]) -> bool:
    for route in routes:
        match, inner = route.matches(scope)
        if match is Match.FULL:
            return not isinstance(route, Mount) or leads_somewhere(route.routes, {**scope, **inner})
    return False


def any_words(words: Sequence[str], page: str) -> None:
    """Others' programs, whose words nobody here can check."""


PROGRAMS: dict[str, Callable[[Sequence[str], str], None]] = {
    "celery": check_celery,
    "curl": curl,
    "docker": docker,
    "export": export,
    "make": make,
    "petiole": petiole,
    "pip": pip,
    **dict.fromkeys(("python", "python3"), python),
    **dict.fromkeys((".", "chmod", "echo", "flask", "hf", "install", "kill", "redis-cli", "uvicorn"), any_words),
    **dict.fromkeys(("helm", "kubectl", "systemctl"), any_words),
}


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("page", PAGES)
def test_programs_take_what_is_printed(page: str) -> None:
    for block in blocks(page):
        for words in commands(block):
            check(words, page)


def inline(page: str) -> Iterator[list[str]]:
    """Commands in the text. An ellipsis stands for what is left out: such a command is not whole."""
    for text in INLINE.findall(CODE.sub("", (REPOSITORY / page).read_text())):
        line = " ".join(text.split())
        if not re.search(r"\.\.\.|…", line):
            yield shlex.split(line.replace("\\|", "|"))


@pytest.mark.parametrize("page", PAGES)
def test_programs_take_what_the_text_names(page: str) -> None:
    for words in inline(page):
        if words[0] != "petiole":
            check(words, page)
            continue
        assert words[1] in subcommands(), words
        options = [word for word in words[2:] if word.startswith("-")]
        known = subcommands()[words[1]]
        assert [option for option in options if option not in known] == [], words


@cache
def subcommands() -> dict[str, str]:
    """By sub-command of `petiole`, its help, with that of its own sub-commands."""
    root = cli.parser()
    found = {"bench": "".join((REPOSITORY / "bench" / name).read_text() for name in ("__main__.py", "share.py"))}
    for name, parser in nested(root):
        found.setdefault(name, parser.format_help() + "".join(inner.format_help() for _, inner in nested(parser)))
    return found


def nested(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    """The sub-commands of a command."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    every = [pair for each in choices for pair in each.items()]
    return [(name, inner) for name, inner in every if isinstance(inner, argparse.ArgumentParser)]


def test_what_no_program_takes_is_found(tmp_path: Path) -> None:
    wrong = [
        "petiole plan petiole-tiny --card l4",
        "petiole statuses",
        "celery -A petiole worker --no-such-option",
        "celery -A petiole inspect stat",
        "make tset",
        "pip install 'petiole[workers]'",
        "python -m bench.gpu --jsn x",
        "docker compose --profile gpus up",
        "curl http://127.0.0.1:8000/v1/chat/completion -d '{}'",
        "export PETIOLE_QEUE=x",
        "wget x",
    ]
    for line in wrong:
        with pytest.raises((AssertionError, click.UsageError)):
            check(shlex.split(line), "README.md")


def test_every_block_is_run_or_says_why_not() -> None:
    printed = {page: set(range(len(blocks(page)))) for page in PAGES if blocks(page)}
    assert printed == {page: {*HERE.get(page, ()), *ELSEWHERE.get(page, {})} for page in {*HERE, *ELSEWHERE}}
    named = {by for others in ELSEWHERE.values() for by in others.values() if by.endswith(".py")}
    assert [by for by in named if not (REPOSITORY / by).exists()] == []


def test_a_shell_block_is_marked() -> None:
    known = re.compile(rf"(?:{'|'.join(re.escape(name) for name in PROGRAMS if len(name) > 2)}) \S", re.M)
    unmarked = [
        (page, text)
        for page in PAGES
        for language, text in BLOCK.findall((REPOSITORY / page).read_text())
        if not language and known.match(text)
    ]
    assert unmarked == []


def test_the_blocks_run_as_they_are_printed(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the password")
    for page, numbers in HERE.items():
        for number in numbers:
            ran = subprocess.run(["sh", "-ec", blocks(page)[number]], cwd=tmp_path, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "secrets" / "broker-url").read_text().startswith("redis://:")

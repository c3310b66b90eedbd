"""What no Python linter reads: C is compiled with every warning as an error, and a Redis takes each Lua script."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import redis

from petiole.gpu_worker.runtime.cpu.native import build
from petiole.tasks.servers.connections import connect
from petiole.tasks.worker import scripts
from tests.support.site import REPOSITORY, RedisServer

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")
"""How a vector is returned differs without AVX-512, but all such functions are inlined."""
C_FILES = sorted((REPOSITORY / "gpu_worker").rglob("*.c"))


def compiled(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    flags = [flag for flag in build._FLAGS if flag != "-shared"]
    command = ["cc", *flags, *WARNINGS, "-c", str(source), "-o", str(target)]
    return subprocess.run(command, capture_output=True, text=True)


needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@cache
def inputs() -> str:
    """A digest of all that a compiler's warnings depend on: the project's C, the flags, processor and compiler."""
    version = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout
    return build._key((*build._FLAGS, *WARNINGS, version))


@needs_compiler
@pytest.mark.parametrize("source", C_FILES, ids=lambda path: path.name)
def test_c_compiles_without_a_warning(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Once for each change: pytest's cache keeps which inputs gave no warning."""
    kept: pytest.Cache | None = getattr(request.config, "cache", None)
    name = f"petiole/without_a_warning/{source.name}"
    if kept and kept.get(name, None) == inputs():
        return
    assert compiled(source, tmp_path / "object.o").stderr == ""
    if kept:
        kept.set(name, inputs())


@needs_compiler
def test_a_warning_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "unused.c"
    source.write_text("int main(int count, char **names) { return 0; }\n")
    assert compiled(source, tmp_path / "object.o").returncode


def test_a_redis_takes_every_lua_script(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        client = connect(server.url)
        for text in scripts.SOURCES.values():
            client.script_load(text)
        with pytest.raises(redis.ResponseError, match="compiling script"):
            client.script_load(next(iter(scripts.SOURCES.values())) + "end")
    finally:
        server.kill()

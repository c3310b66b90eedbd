# /// script
# dependencies = []
# ///
# npm: @openai/codex
"""Codex: `codex exec`, over responses."""

import json
from pathlib import Path

import steps

PROVIDER = f'model_providers.petiole={{name="petiole", base_url="{steps.URL}", wire_api="responses"}}'
OPTIONS = (
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
    "--json",
    *("-c", "model_provider=petiole", "-c", PROVIDER, "-c", "model_providers.petiole.request_max_retries=0"),
)


def _asked(question, *options, model=steps.SCRIPTED):
    return ("codex", "exec", *options, *OPTIONS, "-m", model, question)


def _answer(printed):
    """The last message."""
    events = [json.loads(line) for line in printed.splitlines() if line.startswith('{"type"')]
    said = [one["item"]["text"] for one in events if one.get("item", {}).get("type") == "agent_message"]
    assert said, printed
    return said[-1]


def chat():
    assert _answer(steps.command(*_asked(steps.reciting("It is warm.")))) == "It is warm."


stream = steps.lacks("whole")


def tools():
    printed = steps.command(*_asked(steps.writing("exec_command", cmd="COMMAND")))
    assert _answer(printed) == steps.AFTER_THREE_ROUNDS
    assert steps.written()


def structured():
    parameters = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": parameters,
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    Path("schema.json").write_text(json.dumps(schema))
    made = json.loads(_answer(steps.command(*_asked(steps.ABOUT_ANA, "--output-schema", "schema.json"))))
    assert isinstance(made["age"], int), made


def abort():
    steps.interrupted(*_asked(steps.ENDLESS))


def error():
    printed = steps.command(*_asked(steps.SHORT, model="none"))
    assert "must be a model" in printed, printed
    printed = steps.command(*_asked(steps.SHORT, model=steps.MODEL))
    assert "context" in printed, printed


def resume():
    """A session."""
    assert _answer(steps.command(*_asked(steps.reciting("One.", "Two.")))) == "One."
    assert _answer(steps.command(*_asked("Go on.", "resume", "--last"))) == "Two."


steps.run(globals())

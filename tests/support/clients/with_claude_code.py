# /// script
# dependencies = []
# ///
# npm: @anthropic-ai/claude-code
"""Claude Code: `claude -p`, over Anthropic's messages."""

import json

import steps

AROUND = {
    "ANTHROPIC_BASE_URL": steps.ROOT,
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": steps.SCRIPTED,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
FORMAT = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")


def _asked(*options, model=steps.SCRIPTED):
    return ("claude", "-p", "--model", model, "--allowedTools", "Bash", *FORMAT, *options)


def _events(question, *options, model=steps.SCRIPTED):
    printed = steps.command(*_asked(*options, model=model), said=question, **AROUND)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def chat():
    assert _events(steps.reciting("It is warm."))[-1]["result"] == "It is warm."


def stream():
    text = "and so on " * 20
    deltas = [one["event"].get("delta", {}) for one in _events(steps.reciting(text)) if "event" in one]
    pieces = [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == text


def tools():
    events = _events(steps.writing("Bash", command="COMMAND", description="d"))
    assert events[-1]["result"] == steps.AFTER_THREE_ROUNDS, events[-1]
    assert steps.written()


def structured():
    parameters = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = json.dumps({"type": "object", "properties": parameters, "required": ["name", "age"]})
    call = steps.calling("StructuredOutput", name="Ana", age=31)
    events = _events(steps.reciting(call, "Done."), "--json-schema", schema)
    assert events[-1]["structured_output"] == {"name": "Ana", "age": 31}, events[-1]


def abort():
    steps.interrupted(*_asked(), said=steps.ENDLESS, **AROUND)


def error():
    last = _events(steps.SHORT, model="none")[-1]
    assert last["is_error"], last
    last = _events(steps.SHORT, model=steps.MODEL)[-1]
    assert "too long" in last["result"].lower(), last


def resume():
    """A session."""
    assert _events(steps.reciting("One.", "Two."))[-1]["result"] == "One."
    assert _events("Go on.", "--continue")[-1]["result"] == "Two."


steps.run(globals())

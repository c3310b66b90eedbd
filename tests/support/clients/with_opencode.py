# /// script
# dependencies = []
# ///
# npm: opencode-ai
"""opencode: `opencode run`, over chat completions."""

import json
from pathlib import Path

import steps

CONFIGURATION = {
    "provider": {
        "petiole": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": steps.URL, "apiKey": "none"},
            "models": {
                steps.SCRIPTED: {"limit": {"context": 60_000, "output": 8_000}},
                steps.MODEL: {"limit": {"context": 2_048, "output": 500}},
            },
        }
    }
}
AROUND = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}
Path("opencode.json").write_text(json.dumps(CONFIGURATION))


def _asked(*options, model=steps.SCRIPTED):
    return ("opencode", "run", "-m", f"petiole/{model}", "--title", "t", "--format", "json", *options)


def _printed(question, *options, model=steps.SCRIPTED):
    return steps.command(*_asked(*options, model=model), said=question, **AROUND)


def _answer(question, *options):
    printed = _printed(question, *options)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    said = [one["part"]["text"] for one in events if one["type"] == "text"]
    assert said, printed
    return said[-1]


def chat():
    assert _answer(steps.reciting("It is warm.")) == "It is warm."


stream = steps.lacks("whole")


def tools():
    assert _answer(steps.writing("bash", command="COMMAND", description="d")) == steps.AFTER_THREE_ROUNDS
    assert steps.written()


structured = steps.lacks("no option")


def abort():
    steps.interrupted(*_asked(), said=steps.ENDLESS, **AROUND)


def error():
    printed = _printed(steps.SHORT, model=steps.MODEL)
    assert "context" in printed.lower(), printed


def resume():
    """A session."""
    assert _answer(steps.reciting("One.", "Two.")) == "One."
    assert _answer("Go on.", "--continue") == "Two."


steps.run(globals())

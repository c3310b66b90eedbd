# /// script
# requires-python = "<3.13"
# dependencies = ["aider-chat"]
# ///
"""aider: `aider --message`, over chat completions."""

from pathlib import Path

import steps

AROUND = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_BASE": steps.URL, "OPENAI_API_KEY": "none"}
OPTIONS = "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable --no-pretty"
FENCED = "{0}.py\n```\nprint('{0}')\n```\n"


def _asked(question, *options, model=steps.SCRIPTED):
    command = ("aider", "--model", f"openai/{model}", *OPTIONS.split(), "--edit-format", "whole")
    return (*command, *options, "--message", question)


def chat():
    question = steps.reciting(FENCED.format("one"))
    steps.command(*_asked(question, "--no-stream"), **AROUND)
    assert Path("one.py").read_text() == "print('one')\n"


def stream():
    printed = steps.command(*_asked(steps.reciting("and so on " * 20), "--stream"), **AROUND)
    assert "and so on and so on" in printed, printed


tools = steps.lacks("edits by text")
structured = steps.lacks("edits by text")


def abort():
    steps.interrupted(*_asked(steps.ENDLESS), **AROUND)


def error():
    printed = steps.command(*_asked(steps.TOO_LONG, model=steps.MODEL), **AROUND)
    assert "context" in printed, printed


def resume():
    """A chat's history."""
    history = ("--chat-history-file", "resumed.md")
    steps.command(*_asked(steps.reciting("One.", "Two."), *history), **AROUND)
    printed = steps.command(*_asked("Go on.", *history, "--restore-chat-history"), **AROUND)
    assert "Two." in printed, printed


steps.run(globals())

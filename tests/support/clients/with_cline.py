# /// script
# dependencies = []
# ///
# npm: cline
"""Cline's command line, over chat completions."""

import json

import steps


def _asked(question, *options, model=steps.SCRIPTED):
    return ("cline", "-P", "openai", "-m", model, "--retries", "1", "--json", *options, question)


def _events(printed):
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"ts"')]


def _last(printed):
    done = [one["event"] for one in _events(printed) if one.get("event", {}).get("type") == "done"]
    assert done, printed
    return done[-1]["text"]


steps.command("cline", "auth", "-p", "openai", "-k", "none", "-m", steps.SCRIPTED, "-b", steps.URL)


def chat():
    assert _last(steps.command(*_asked(steps.reciting("It is warm.")))) == "It is warm."


def stream():
    text = "and so on " * 20
    events = _events(steps.command(*_asked(steps.reciting(text))))
    pieces = [one["event"]["text"] for one in events if one.get("event", {}).get("contentType") == "text"]
    assert len(pieces) > 2, events


def tools():
    printed = steps.command(*_asked(steps.writing("run_commands", commands=["COMMAND"])))
    assert _last(printed) == steps.AFTER_THREE_ROUNDS, printed
    assert steps.written()


structured = steps.lacks("no option")


def abort():
    steps.interrupted(*_asked(steps.ENDLESS))


def error():
    printed = steps.command(*_asked(steps.SHORT, "--compaction", "off", model=steps.MODEL))
    assert "context" in printed.lower(), printed


resume = steps.lacks("interactively")
steps.run(globals())

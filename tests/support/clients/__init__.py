"""Programs of clients of others, each with the newest one unmodified: `make clients` runs them, each in an
environment of its own, and `tests/gateway/test_clients.py` those whose packages the tests' environment has.

    with_NAME.py, with_NAME.mjs   a program: `python with_openai.py URL`. Its head names its packages (inline
                                  script metadata, or a line `npm: ...`), the first one is the client. It does the
                                  steps of STEPS, and more
    steps.py, steps.mjs           what runs the steps, and prints a line of JSON for each
    openai_seeds.py               a plugin for openai-python's own tests
    record.json                   what came of each program when it last passed: `docs/gateway.md` shows it
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE / "record.json"
PROGRAMS = sorted([*HERE.glob("with_*.py"), *HERE.glob("with_*.mjs")])
STEPS = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools, three rounds",
    "structured": "structured output",
    "abort": "abort",
    "error": "error",
    "resume": "resume",
}
"""By name, what each program does, or says why its client cannot: the heads of the table."""

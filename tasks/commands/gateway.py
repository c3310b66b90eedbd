"""`petiole serve` and `petiole demo --http`: the gateway, which stands above `tasks`. So a string names it."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from petiole.tasks.commands import demo
from petiole.tasks.errors import PetioleError
from petiole.tasks.servers import embedded
from petiole.tasks.settings import settings

GATEWAY = "petiole.gateway.program"

EXAMPLE = """
Try it:

curl {url}/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "petiole-tiny",
  "messages": [{{"role": "user", "content": "Count from 1 to 40."}}],
  "stream": true
}}'

Ctrl-C ends it.
"""


def serve(host: str | None, port: int | None) -> int:
    code: int = _gateway().run(host, port)
    return code


def show() -> int:
    """An embedded Redis, a worker on petiole-tiny and a gateway, until stopped."""
    program = _gateway()
    os.environ.update(demo.environment())
    settings.cache_clear()
    try:
        print("Starting Redis, a worker and a gateway ...", flush=True)
        with demo.worker():
            code: int = program.run(None, None, EXAMPLE)
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        embedded.release()


def _gateway() -> ModuleType:
    try:
        return import_module(GATEWAY)
    except ImportError as error:
        raise PetioleError(f"a gateway needs 'petiole[gateway]': {error}") from None

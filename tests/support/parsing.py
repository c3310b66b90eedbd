"""Python's text as a tree, without a garbage collection meanwhile.

Python 3.11 counts in one place how deep it is in all texts that it parses. While it makes a tree, a collection may
end an object whose error is shown, and a traceback parses its lines: the outer text is a SystemError then."""

from __future__ import annotations

import ast
import gc


def parsed(text: str) -> ast.Module:
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()

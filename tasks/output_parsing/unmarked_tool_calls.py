"""A message that is a call without marks: one fenced block of JSON, or JSON alone, that names a tool of the
request.

Models write it in place of their format's marks. Its text is kept back while it may be one, so nothing that was
told is taken back: text that cannot be a call any more is content, from its beginning on."""

from __future__ import annotations

import re

from petiole.tasks.output_parsing.json_values import JSON
from petiole.tasks.output_parsing.template import Tools
from petiole.tasks.output_parsing.tool_calls import JsonCalls

_FENCE = re.compile(r"```[a-z]*[ \t]*\r?\n")
_MAY_BE_FENCE = re.compile(r"`{0,3}|```[a-z]*[ \t]*\r?")
_END, _FENCED_END = re.compile(r"\s*"), re.compile(r"\s*```\s*")
_FIRST_KEY = re.compile(r'\s*\[?\s*\{\s*"([^"]*)"')
_KEYS = ("name", "arguments", "parameters", "type", "id")
_MOST = 65_536
"""Characters. More is content."""


class WholeMessage:
    """`failed`: the text is no call. `finish`: name and arguments of each, if the text is a whole one."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._at = -1  # where the JSON is read; -1: the fence is not complete
        self._json_at = 0
        self._fenced = self.failed = False
        self._body = JsonCalls(self, JSON, ("name",), ("arguments", "parameters"))
        self._calls: list[tuple[str, list[str]]] = []
        self._given = True

    def push(self, text: str) -> None:
        self._text += text
        if self._at < 0:
            self._text = self._text.lstrip()
            self._begin()
        if self._at < 0 or self.failed:
            return
        if not self._body.done:
            first = _FIRST_KEY.match(self._text, self._json_at)
            self.failed |= first is not None and first[1] not in _KEYS
            self._read(final=False)
        rest = self._text[self._at :].strip() if self._body.done else ""
        self.failed |= len(self._text) > _MOST or not ("```" if self._fenced else "").startswith(rest)

    def _begin(self) -> None:
        fence = _FENCE.match(self._text)
        if fence is not None:
            self._fenced, self._at = True, fence.end()
            self._json_at = self._at
        elif self._text[:1] in ("{", "["):
            self._at = 0
        else:
            self.failed = _MAY_BE_FENCE.fullmatch(self._text) is None

    def _read(self, *, final: bool) -> None:
        before = -1
        while not self._body.done and not self._body.failed and before < self._at:
            before, self._at = self._at, self._body.feed(self._text, self._at, final=final)
        self.failed |= self._body.failed

    def finish(self) -> list[tuple[str, str]]:
        """The calls. No more text comes."""
        if self._at >= 0:
            self._read(final=True)
        if self.failed or not self._body.done or not self._given or not self._body.given:
            return []
        if (_FENCED_END if self._fenced else _END).fullmatch(self._text, self._at) is None:
            return []
        return [(name, "".join(arguments)) for name, arguments in self._calls]

    # ------------------------------------------------------------ what the body tells

    def begin(self, name: str) -> None:
        self.failed |= name not in self._tools
        self._calls.append((name, []))

    def arguments(self, text: str) -> None:
        self._calls[-1][1].append(text)

    def end(self, complete: bool) -> None:
        self._given &= complete

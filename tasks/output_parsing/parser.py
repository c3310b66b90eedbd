"""The parser: what a model wrote, divided into reasoning, content and calls of tools, while it is written.

    parser = Parser(template, prompt_end=prepared.prompt_end, tools=prepared.tool_types)
    for text in texts:
        events = parser.push(text)
    events = parser.finish()

It is pure and causal. What was told is never taken back. However a text is split, the events are the same, but for
how texts are split. The rules for what a template does not say:

- A mark that no call follows is text, up to the first character that cannot be part of a call.
- From the tool's name on, it is a call. If its arguments are not valid, or end too early, the arguments are what
  the model wrote, up to the mark that ends the call, and the call is not `complete`.
- In a string of the arguments all is data, also a mark.
- Behind a call content goes on. The mark that ends the call is left out there, once.
- Without tools, marks of calls are text.
- Where a whole message may be a call (see `unmarked_tool_calls`), its text is told once it cannot be one.
- Spaces before a mark are left out. So are spaces after a mark, where nothing of the kind came before. All other
  spaces stay, those at the end of the output, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from petiole.tasks.output_parsing.marks import Mark
from petiole.tasks.output_parsing.template import Field, Kind, Template, Tools, WatchedMarks
from petiole.tasks.output_parsing.tool_calls import Body
from petiole.tasks.output_parsing.unmarked_tool_calls import WholeMessage

SPACES = " \t\n\r"


class ContentDelta(NamedTuple):
    """`at`: where this is in the output: from this character on, as it stands."""

    text: str
    at: int


class ReasoningDelta(NamedTuple):
    """`at`: as of content."""

    text: str
    at: int


class CallStarted(NamedTuple):
    call: int
    name: str


class ArgumentsDelta(NamedTuple):
    """More of the arguments, which are JSON."""

    call: int
    text: str


class CallEnded(NamedTuple):
    """`complete`: the arguments are a JSON object."""

    call: int
    complete: bool


Event = ContentDelta | ReasoningDelta | CallStarted | ArgumentsDelta | CallEnded


class Parser:
    """The parser of one output. `tools`: by tool, the types of its parameters; None: calls are not read. `spans`:
    where reasoning is in the text, with its marks; complete once the parser is finished."""

    def __init__(self, template: Template, *, prompt_end: str = "", tools: Tools | None = None) -> None:
        self._template = template
        self._tools: Tools = tools or {}
        self._watch = template.without_calls
        self._enter(None)
        self._body: Body | None = None
        self._rest = ""
        self._spaces: list[str] = []
        self._spaces_at = 0  # where the first of them is in the output
        self._held: list[str] = []  # what may be a call: behind content, or behind the last call of a list
        self._held_at = 0
        self._fresh = False  # nothing but spaces since a mark
        self._told: set[Kind] = set()
        self._events: list[Event] = []
        self._read_before = 0  # characters before `_rest`
        self._thought_from = 0
        self.spans: list[tuple[int, int]] = []
        self._calls = 0
        self._calling = self._begun = False
        self._whole: WholeMessage | None = None
        self._kept: list[ContentDelta] = []  # of a message that may be a call
        if prompt_end:
            self._run(template.behind_anchor(prompt_end), final=False)
            begun = any(isinstance(event, ContentDelta) for event in self._events)
            self._rest = ""
            self._read_before = self._thought_from = 0
            self.spans.clear()
            self._spaces.clear()
            self._told.clear()
            self._events.clear()
        else:
            begun = False
        if tools is not None:
            self._watch = template.with_calls
        if tools and template.whole and not begun:
            self._whole = WholeMessage(tools)

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes is reasoning, as far as is known."""
        return self._field is not None and self._field.kind == "reasoning"

    def push(self, text: str) -> list[Event]:
        self._run(text, final=False)
        return self._taken()

    def finish(self) -> list[Event]:
        """No more text comes."""
        self._run("", final=True)
        self._give_back()
        if self._calling:
            self.end(False)
        if not self._fresh:
            self._tell("".join(self._spaces), self._spaces_at)
        if self.is_reasoning:
            self.spans.append((self._thought_from, self._read_before))
        calls = [] if self._whole is None else self._whole.finish()
        if calls:
            self._kept.clear()
        self._tell_kept()
        for name, arguments in calls:
            self._events.append(CallStarted(self._calls, name))
            self.arguments(arguments)
            self.end(True)
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ steps

    def _run(self, text: str, *, final: bool) -> None:
        text, at = self._rest + text, 0
        while True:
            if self._body is not None:
                at, again = self._in_body(self._body, text, at, final)
            elif self._calling:
                at, again = self._in_invalid(text, at, final)
            else:
                at, again = self._in_text(text, at, final)
            if not again:
                break
        self._rest = text[at:]
        self._read_before += at

    def _in_text(self, text: str, at: int, final: bool) -> tuple[int, bool]:
        field = self._field
        if field is None:
            marks = self._watch.marks
        elif field.closing is None:
            self._read(text[at:], self._read_before + at)
            return len(text), False
        else:
            marks = field.closing
        found = marks.find(text, at, final=final)
        if not isinstance(found, Mark):
            self._read(text[at:found], self._read_before + at)
            return found, False
        self._read(text[at : found.start], self._read_before + at)
        opened = self._watch.fields[found.number] if field is None else None
        if opened is None or opened.kind != "calls":
            self._leave_spaces()
            if self.is_reasoning:
                self.spans.append((self._thought_from, self._read_before + found.end))
            self._enter(opened)
            if self.is_reasoning:
                self._thought_from = self._read_before + found.start
            self._settle()
            return found.end, True
        assert opened.reader is not None
        self._enter(opened)
        self._held, self._held_at = [text[found.start : found.end]], self._read_before + found.start
        captures = marks.captures(text, found) if opened.reader.captured else {}
        self._body = opened.reader.body(self, captures, self._tools, self._template.needs_tool)
        return found.end, True

    def _in_body(self, body: Body, text: str, at: int, final: bool) -> tuple[int, bool]:
        opened = self._field
        assert opened is not None
        calls = self._calls
        after = body.feed(text, at, final=final)
        ended = self._calls > calls
        if ended:
            self._held_at = self._read_before + after
        elif not self._calling:
            self._held.append(text[at:after])
        if body.failed:
            self._body = None
            if not self._calling:
                self._give_back()
                self._leave_call(opened)
        elif body.done:
            if self._begun:
                self._held.clear()
            self._give_back()
            self._leave_call(opened)
        elif not ended:
            if final and self._calling:
                self.arguments(text[after:])
            elif final:
                self._held.append(text[after:])
            return after, False
        return after, True

    def _in_invalid(self, text: str, at: int, final: bool) -> tuple[int, bool]:
        """In a call whose arguments are not valid: up to its end."""
        field = self._field
        assert field is not None
        found = field.ending.find(text, at, final=final)
        until = found.start if isinstance(found, Mark) else found
        if until > at:
            self.arguments(text[at:until])
        if isinstance(found, Mark):
            self.end(False)
            self._leave_call(field)
            return until, True
        return until, False

    def _leave_call(self, field: Field) -> None:
        """Go on outside all fields. If a call has begun, its own end may come there."""
        self._body = None
        self._watch = self._template.after(field) if self._begun else self._template.with_calls
        self._begun = False
        self._enter(None)

    def _give_back(self) -> None:
        """What was held is no call, but text."""
        if self._held:
            held, self._held = self._held, []
            self._enter(None)
            self._read("".join(held), self._held_at)

    # ------------------------------------------------------------ texts

    def _enter(self, field: Field | None) -> None:
        """Text is of this field from now on. None: outside all fields."""
        of = field or self._template.implicit
        self._field: Field | None = field
        self._kind: Kind | None = None if of is None else of.kind
        self._strips = of is None or of.strip

    def _read(self, text: str, at: int) -> None:
        """Text of the open field, or of the one that has no marks. `at`: where it is in the output."""
        if not text:
            return
        bare = text.rstrip(SPACES)
        if bare:
            size = len(bare)
            if self._fresh and self._kind not in self._told and self._strips:
                bare = bare.lstrip(SPACES)
                self._spaces.clear()
            elif self._spaces:
                bare = "".join(self._spaces) + bare
                self._spaces.clear()
            self._fresh = False
            self._tell(bare, at + size - len(bare))
            if size == len(text):
                return
            text, at = text[size:], at + size
        if not self._spaces:
            self._spaces_at = at
        self._spaces.append(text)

    def _tell(self, text: str, at: int) -> None:
        kind = self._kind
        if not text or kind is None:
            return
        self._told.add(kind)
        if kind == "reasoning":
            self._tell_kept()
            self._events.append(ReasoningDelta(text, at))
        elif self._whole is None:
            self._events.append(ContentDelta(text, at))
        else:
            self._kept.append(ContentDelta(text, at))
            self._whole.push(text)
            if self._whole.failed:
                self._tell_kept()

    def _tell_kept(self) -> None:
        """What was kept back is content, if there is any; so the message is no call."""
        if self._kept:
            self._whole = None
        self._events += self._kept
        self._kept.clear()

    def _leave_spaces(self) -> None:
        """A mark comes."""
        if not self._strips:
            self._tell("".join(self._spaces), self._spaces_at)
        self._spaces.clear()
        self._fresh = True

    def _settle(self) -> None:
        """Behind a mark that belongs to no call, the end of the last call is no longer expected."""
        watch: WatchedMarks = self._watch
        template = self._template
        self._watch = watch if watch is template.without_calls else template.with_calls

    # ------------------------------------------------------------ what a body tells

    def begin(self, name: str) -> None:
        field = self._field
        self._enter(None)
        self._leave_spaces()
        self._tell_kept()
        self._whole = None
        self._enter(field)
        self._held.clear()
        self._begun = self._calling = True
        self._events.append(CallStarted(self._calls, name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self._calls, text))

    def end(self, complete: bool) -> None:
        self._events.append(CallEnded(self._calls, complete))
        self._calls += 1
        self._calling = False


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with texts that follow one another in the output as one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case ContentDelta(one, at), ContentDelta(other, then) if at + len(one) == then:
                found[-1] = ContentDelta(one + other, at)
            case ReasoningDelta(one, at), ReasoningDelta(other, then) if at + len(one) == then:
                found[-1] = ReasoningDelta(one + other, at)
            case ArgumentsDelta(call, one), ArgumentsDelta(_, other):
                found[-1] = ArgumentsDelta(call, one + other)
            case _:
                found.append(event)
    return found

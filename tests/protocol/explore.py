"""Breadth-first exploration of the protocol, and what must hold in every state and from every state.

A state is wrong in itself (`wrong`), or if the death of any one worker would lose the task (`fragile`), or if the
system cannot come to rest from it although nothing more goes wrong (`restless`). The first such state that is
found is the nearest; the counterexample tells how it is reached.
"""

from __future__ import annotations

import json
from collections import deque

from tests.protocol.protocol import Protocol
from tests.protocol.state import FINISHED, State, Worker, initial


class Counterexample(AssertionError):  # noqa: N818 - what it is
    """A story that must not happen."""


def explore(protocol: Protocol) -> int:
    """Explore all states. Returns their number, or raises the shortest counterexample."""
    start = initial(protocol.scenario)
    came_by: dict[State, tuple[str, State | None]] = {start: ("", None)}
    before: dict[State, list[State]] = {start: []}  # by steps that are no misfortunes
    todo = deque([start])
    while todo:
        state = todo.popleft()
        if what := wrong(state, protocol) or fragile(state, protocol):
            raise Counterexample(story(what, state, came_by))
        for label, after, cost in protocol.steps(state):
            if after not in came_by:
                came_by[after], before[after] = (label, state), []
                todo.append(after)
            if not cost:
                before[after].append(state)
    if (state := restless(before, protocol)) is not None:
        raise Counterexample(story("it cannot come to rest", state, came_by))
    return len(came_by)


def wrong(s: State, protocol: Protocol) -> str:
    """What is wrong with a state in itself, or nothing."""
    ends = [entry for entry in s.log if entry["finish_reason"] is not None]
    tokens = [token for entry in s.log for token in entry["token_ids"]]
    if len(ends) > 1 or (ends and s.log[-1] is not ends[0]):
        return "the stream goes on after its end"
    if tokens != list(range(len(tokens))):
        return "a token is missing in the stream, or twice in it"
    if tokens and (mixed := mix(s)):
        return mixed
    if s.called > 1 + s.may_call_again:
        return "what is linked is sent twice"
    if s.alone and int(s.field("deaths") or 0) > s.may_count_deaths:
        return "a death is counted although nothing has happened"
    if not (s.to_send or over(s, protocol) or message_exists(s) or any(map(lively, s.workers))):
        return "the task is lost"
    return ""


def mix(s: State) -> str:
    """What is wrong with who has made the tokens, and who has announced the task."""
    makers = {entry["model"] for entry in s.log if entry["token_ids"]}
    if len(makers) > 1:
        return "the stream has tokens of two models"
    announced = json.loads(s.field("prepared") or "{}")
    if announced != {"attempt": s.log[0]["attempt"], "model": s.log[0]["model"]}:
        return "the task was announced by another attempt than the one that began its log"
    return ""


def fragile(s: State, protocol: Protocol) -> str:
    """Whether the death of one worker would lose the task."""
    if s.to_send or over(s, protocol) or message_exists(s):
        return ""
    alone = sum(map(lively, s.workers)) == 1
    return "the task is lost if the only worker that has it dies" if alone else ""


def message_exists(s: State) -> bool:
    return bool(s.queued or s.held)


def lively(w: Worker) -> bool:
    return any(not job.over for _, job in w.jobs)


def over(s: State, protocol: Protocol) -> bool:
    """The task has its end, whoever waits for it knows, and what is linked was sent."""
    stored = s.stored == FINISHED.get(s.done) or (protocol.scenario.kind == "ignored" and s.done == "success")
    return bool(s.done) and stored and (s.called > 0 or not protocol.links(s.done))


def at_rest(s: State, protocol: Protocol) -> bool:
    idle = all(not (w.jobs or w.mailbox or w.timers or w.acks or w.rejects) for w in s.workers)
    return idle and not s.to_send and not message_exists(s) and over(s, protocol)


def restless(before: dict[State, list[State]], protocol: Protocol) -> State | None:
    """The first state from which the system cannot come to rest without further misfortunes."""
    calm = {s for s in before if at_rest(s, protocol)}
    todo = deque(calm)
    while todo:
        for state in before[todo.popleft()]:
            if state not in calm:
                calm.add(state)
                todo.append(state)
    return next((s for s in before if s not in calm), None)


def story(what: str, state: State, came_by: dict[State, tuple[str, State | None]]) -> str:
    labels: list[str] = []
    at: State | None = state
    while at is not None:
        label, at = came_by[at]
        labels.append(label)
    redis = {**dict(state.broker), **dict(state.task)}
    lines = [f"\n{what}:", *reversed(labels[:-1]), "", *(f"    {key}: {item}" for key, item in redis.items())]
    lines.append(f"    stored {state.stored!r}, completion {state.completion!r}, sent {state.called}")
    return "\n".join([*lines, *(f"    {w}" for w in state.workers)])

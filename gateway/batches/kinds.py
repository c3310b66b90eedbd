"""What the body of a batch's line becomes, by its endpoint, and the body of its answer, which is that of the same
request over HTTP. It is made of the tasks' results alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from petiole.contract.errors import shorten
from petiole.contract.results.task_result import GenerationResult, ShownPiece, StreamDelta
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.failures import ended_early, failure_of, invalid
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import RequestBody
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.openai import chat_view, completions_view, conversation
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.completions import TextCompletion
from petiole.gateway.openai.responses import items, resource
from petiole.gateway.openai.responses.request import CreateResponse, History, Times
from petiole.gateway.openai.sampling_options import SamplingBody
from petiole.gateway.pooling.interfaces import Embeddings, PoolingResult
from petiole.tasks import errors
from petiole.tasks.fleet.models import ModelRoute
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.rows.output_lines import TaskOutcome

SAME = StreamDelta.model_fields.keys() & GenerationResult.model_fields.keys() - ShownPiece.model_fields.keys()

Answer = Callable[[Plan, Sequence[TaskOutcome]], dict[str, Any]]
"""The body of an answer. It keeps nothing of the line, which may be long. Raises `Failure`."""


class BatchEndpoint(NamedTuple):
    """An endpoint. `planned`: the plan of a body under an id, at a time. Raises `Failure` and `InvalidRequest`."""

    body: type[RequestBody]
    prefix: str
    planned: Callable[[Any, str, int, ModelRoute], tuple[Plan, Answer]]


def _refuse(field: str, limit: str, value: object) -> NoReturn:
    raise invalid(field, f"{field}: {limit}, got {shorten(value)}", "invalid_value")


def _stays_whole(asked: SamplingBody) -> None:
    if asked.stream:
        _refuse("stream", "must be false in a batch", True)


def _chat(asked: ChatCompletion, name: str, now: int, found: ModelRoute) -> tuple[Plan, Answer]:
    _stays_whole(asked)
    if urls := conversation.to_fetch(asked.messages):
        _refuse("messages", "images must be data URLs in a batch", urls[0])
    return asked.plan(name, now, found, True), partial(_shown, chat_view.whole)


def _text(asked: TextCompletion, name: str, now: int, found: ModelRoute) -> tuple[Plan, Answer]:
    _stays_whole(asked)
    return asked.plan(name, now, found, True), partial(_shown, completions_view.whole)


_NOT_KEPT: Mapping[str, str] = {
    "background": "must be false in a batch, which is in the background as a whole",
    "store": "must be false in a batch, whose responses are in its output alone",
    "previous_response_id": "must not be given in a batch: give the turns before as input",
    "conversation": "must not be given in a batch: give the turns before as input",
}


def _response(asked: CreateResponse, name: str, now: int, found: ModelRoute) -> tuple[Plan, Answer]:
    """A response in a batch. It is not stored, and says so."""
    _stays_whole(asked)
    for field, limit in _NOT_KEPT.items():
        if field in asked.model_fields_set and (given := getattr(asked, field)):
            _refuse(field, limit, given)
    if urls := items.to_fetch("input", asked.input):
        _refuse(urls[0][0], "images must be data URLs in a batch", urls[0][1])
    own = asked.own()
    for place, item in enumerate(own):
        if item["type"] == "item_reference":
            _refuse(f"input[{place}].type", "must be an item of its own in a batch", "item_reference")
    alone = asked.model_copy(update={"store": False})
    plan = alone.plan(name, Times(now, settings().gateway_keep_s), found, True, History(), own)
    return plan, partial(_shown, lambda record, wholes: resource.finished(record, wholes[0]))


def _embeddings(asked: Embeddings, name: str, now: int, found: ModelRoute) -> tuple[Plan, Answer]:
    if asked.messages is not None:
        _refuse("messages", "must be an input of text in a batch", asked.messages)
    if ids := asked.ids_to_spell:
        _refuse("input", "must be text in a batch", ids[0])
    plan = asked.plan(name, now, found)
    calls = [TaskCall(one.task, _without_readers(one.options)) for one in plan.calls]
    return replace(plan, calls=calls), partial(_vectors, asked.model_copy(update={"input": []}))


def _without_readers(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "cancel_on_disconnect"}


KINDS: dict[str, BatchEndpoint] = {
    "/v1/chat/completions": BatchEndpoint(ChatCompletion, "chatcmpl-", _chat),
    "/v1/completions": BatchEndpoint(TextCompletion, "cmpl-", _text),
    "/v1/responses": BatchEndpoint(CreateResponse, "resp_", _response),
    "/v1/embeddings": BatchEndpoint(Embeddings, Embeddings.PREFIX, _embeddings),
}


# ---------------------------------------------------------------- answers


def _shown(
    view: Callable[[RequestRecord, Sequence[CollectedOutput]], dict[str, Any]],
    plan: Plan,
    outcomes: Sequence[TaskOutcome],
) -> dict[str, Any]:
    return view(plan.record, [_whole(plan, choice, outcome) for choice, outcome in enumerate(outcomes)])


def _whole(plan: Plan, choice: int, outcome: TaskOutcome) -> CollectedOutput:
    """Raises `Failure`."""
    result = _result(plan, outcome)
    fields = {name: getattr(result, name) for name in SAME}
    delta = StreamDelta(
        task_id=plan.record.tasks[choice],
        index=0,
        **{name: value for name, value in fields.items() if name != "task_id"},
        content=result.content,
        tool_calls=result.tool_calls,
        reasoning=None if result.reasoning is None else result.reasoning.text,
    )
    whole = CollectedOutput()
    for part in OutputAssembler.of(plan.record, choice).read(delta):
        whole.add(part)
    return whole


def _vectors(asked: Embeddings, plan: Plan, outcomes: Sequence[TaskOutcome]) -> dict[str, Any]:
    [outcome] = outcomes
    result = _result(plan, outcome)
    if result.finish_reason != "stop":
        raise ended_early(result.finish_reason)
    made = PoolingResult(vectors=result.vectors or [], prompt_tokens=result.usage.prompt_tokens)
    answer = asked.answer(plan.record, made)
    return {**answer, "data": list(answer["data"])}


def _result(plan: Plan, outcome: TaskOutcome) -> GenerationResult:
    """Raises `Failure`."""
    if outcome.error is not None:
        raise failure_of(errors.rebuild(outcome.error), plan.names)
    return GenerationResult.model_validate(outcome.result)

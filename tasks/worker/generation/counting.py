"""Answers a count with the tokenizer and the chat template of the engine, on the calling thread."""

from __future__ import annotations

from typing import Any

from petiole.contract.requests.count import CountRequest
from petiole.contract.requests.images import is_handle
from petiole.gpu_worker import exceptions as engine_errors
from petiole.gpu_worker.request import Request
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.worker.generation import local
from petiole.tasks.worker.generation.engine_requests import images_of, stored
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.output.outcomes import public

_serving: list[EngineLike] = []

IMAGE = -1
"""A position of an image among the returned token ids."""


def serve(engine: EngineLike) -> None:
    """Count with this engine from now on. In a process that serves none, an eager count loads one."""
    _serving[:] = [engine]


def answer(request: CountRequest) -> dict[str, Any]:
    """The result of the task. Raises the exception that the task fails with."""
    engine = _serving[0] if _serving else local.engine()
    more = dict[str, Any]()
    try:
        if request.token_ids is not None:
            found, special = request.token_ids, request.skip_special_tokens
            more["texts"] = [
                _naming(f"token_ids[{k}]", lambda ids=ids: engine.text_of(ids, skip_special_tokens=special))
                for k, ids in enumerate(found)
            ]
        elif request.texts is not None:
            adds = request.add_special_tokens
            found = [
                _naming(
                    f"texts[{k}]",
                    lambda text=text: engine.tokens_of(Request(prompt=text, add_special_tokens=adds)),
                )
                for k, text in enumerate(request.texts)
            ]
        else:
            found = [_of_chat(engine, request)]
    except Exception as error:
        raise public(error) from None
    if request.with_ids:
        more["token_ids"] = [[max(token, IMAGE) for token in one] for one in found]
    if request.with_tokens:
        more["tokens"] = [*map(engine.entries_of, found)]
    most = engine.facts()["max_model_len"]
    return {"counts": [*map(len, found)], **more, "max_model_len": most, "model": engine.limits.model}


def _of_chat(engine: EngineLike, request: CountRequest) -> list[int]:
    chat, known = request.chat(), dict[str, bytes]()
    if any(map(is_handle, chat.images())):
        known = stored(connections.streams(), [chat], settings().image_ttl_s)
    asked = {**chat.subject(), "add_generation_prompt": request.add_generation_prompt}
    return engine.tokens_of(Request(**asked, images=images_of(chat, known), image_views=chat.image_views()))


def _naming(field: str, count: Any) -> Any:
    """The result of `count`, whose errors name the field."""
    try:
        return count()
    except engine_errors.InvalidRequest as error:
        raise InvalidRequest(field, error.limit, error.value) from None

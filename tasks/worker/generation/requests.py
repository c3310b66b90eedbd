"""Converts a task's request into the engine's, and says what readers need to know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from petiole.gpu_worker.request import Constraint, Request, SamplingParams
from petiole.gpu_worker.request.skills import SkillCall
from petiole.outputs import Prepared
from petiole.tasks.requests.schemas import Common

# Celery's priorities on Redis: 0 is the highest and the default. The engine has the same convention.
HIGHEST_PRIORITY = 0

SHORT = 64
"""Characters of a variable of the chat template that readers may need to know."""


def engine_request(
    task_id: str,
    task_request: Common,
    *,
    images: Sequence[bytes] = (),
    priority: int = HIGHEST_PRIORITY,
    deadline_s: float | None = None,
    resume_token_ids: Sequence[int] = (),
    resume_bins: Sequence[Sequence[int] | None] = (),
    resume_adapter_key: str | None = None,
) -> Request:
    """The engine's request. It is the same on every worker, except for the resumed tokens and adapter."""
    sampling = task_request.sampling()
    if sampling["seed"] is None:
        sampling["seed"] = seed_of(task_id)
    constraint, subject = task_request.constraint(), task_request.subject()
    if "skill" in subject:
        subject["skill"] = SkillCall(*subject["skill"])
    return Request(
        **subject,
        images=images,
        sampling=SamplingParams(**sampling),
        constraint=None if constraint is None else Constraint(*constraint),  # type: ignore[arg-type]
        adapter=getattr(task_request, "adapter", None),
        salt=task_request.salt,
        priority=priority,
        deadline_s=deadline_s,
        resume_token_ids=tuple(resume_token_ids),
        resume_bins=tuple(resume_bins),
        resume_adapter_key=resume_adapter_key,
        request_id=task_id,
    )


def described(prepared: Prepared, request: Request) -> Prepared:
    """`prepared` with what the request says about its output: its tools, and how the template was to reason."""
    short = {
        name: value
        for name, value in request.chat_template_kwargs.items()
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= SHORT)
    }
    return replace(prepared, tool_types=_tool_types(request.tools or ()) or None, reasoning=short or None)


def _tool_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """By tool: the JSON type of each parameter that names one type."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        match tool.get("function", tool):
            case {"name": str(name), "parameters": {"properties": dict(properties)}}:
                found[name] = {
                    parameter: kind
                    for parameter, schema in properties.items()
                    if isinstance(schema, dict) and isinstance(kind := schema.get("type"), str)
                }
            case {"name": str(name)}:
                found[name] = {}
    return found


def seed_of(task_id: str) -> int:
    """The default seed of a task. It depends only on the task id, so that every worker samples the same noise."""
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big") >> 1

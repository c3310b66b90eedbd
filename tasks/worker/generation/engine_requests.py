"""Converts a task's request into the engine's, and reads its images: from the message, or from Redis by their
handles."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import redis

from petiole.contract.requests.generation import Common, Options
from petiole.contract.requests.images import data_of, handle_of, is_handle
from petiole.gpu_worker.request import Constraint, Embedding, Request, Scoring
from petiole.gpu_worker.request.skills import SkillCall
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import image_key
from petiole.tasks.worker.generation.presentation import Presentation

# Celery's priorities on Redis: 0 is the highest and the default. The engine has the same convention.
HIGHEST_PRIORITY = 0


def engine_request(
    task_id: str,
    task_request: Common,
    *,
    presentation: Presentation | None = None,
    images: Sequence[bytes] = (),
    priority: int = HIGHEST_PRIORITY,
    deadline_s: float | None = None,
    resume_token_ids: Sequence[int] = (),
    resume_bins: Sequence[Sequence[int] | None] = (),
    resume_prompt_tokens: int = 0,
    resume_adapter_key: str | None = None,
    resume_fingerprint: str | None = None,
) -> Request:
    """The engine's request. It is the same on every worker of a model, but for what it resumes."""
    sampling = task_request.sampling()
    if sampling.seed is None:
        sampling = replace(sampling, seed=seed_of(task_id))
    presentation = presentation or Presentation()
    constraint, subject = presentation.constraint(task_request), task_request.subject()
    if "skill" in subject:
        subject["skill"] = SkillCall(*subject["skill"])
    if "embedding" in subject:
        subject["embedding"] = Embedding(**subject["embedding"])
    if "scoring" in subject:
        subject["scoring"] = Scoring(**subject["scoring"])
    options = task_request if isinstance(task_request, Options) else None
    request = Request(
        **subject,
        images=images,
        image_views=task_request.image_views(),
        sampling=sampling,
        constraint=None if constraint is None else Constraint(*constraint),  # type: ignore[arg-type]
        adapter=getattr(task_request, "adapter", None),
        truncate=None if options is None else options.truncate,
        truncate_to=None if options is None else options.truncate_to,
        salt=task_request.salt,
        priority=priority,
        deadline_s=deadline_s,
        resume_token_ids=tuple(resume_token_ids),
        resume_bins=tuple(resume_bins),
        resume_prompt_tokens=resume_prompt_tokens,
        resume_adapter_key=resume_adapter_key,
        resume_fingerprint=resume_fingerprint,
        request_id=task_id,
    )
    return presentation.with_marks(request)


def seed_of(task_id: str) -> int:
    """The default seed of a task. It depends only on the task id, so that every worker samples the same noise."""
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big") >> 1


def stored(client: redis.Redis, requests: Iterable[Common], ttl_s: int) -> dict[str, bytes]:
    """The images to which these requests have handles, by handle. Expired images are missing, and so is what
    somebody has stored under another image's handle. Redis keeps the others for another `ttl_s`. Raises redis-py's
    errors."""
    handles = list(dict.fromkeys(image for one in requests for image in one.images() if is_handle(image)))
    if not handles:
        return {}
    pipe = client.pipeline(transaction=False)
    for handle in handles:
        pipe.get(image_key(handle))
        pipe.expire(image_key(handle), ttl_s)
    found = pipe.execute(raise_on_error=False)[::2]
    return {
        handle: data
        for handle, data in zip(handles, found, strict=True)
        if isinstance(data, bytes) and handle_of(data) == handle
    }


def images_of(request: Common, known: Mapping[str, bytes]) -> list[bytes]:
    """The request's images, in order. `known`: the images that `stored` returned. Raises `InvalidRequest`."""
    return [_image(image, known) for image in request.images()]


def _image(image: str, known: Mapping[str, bytes]) -> bytes:
    if not is_handle(image):
        return data_of("image", image)
    if image not in known:
        raise InvalidRequest("image", "must be a handle whose image is still kept: put it again", image)
    return known[image]

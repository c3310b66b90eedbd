"""The bytes of the images that tasks are about: out of their messages, or out of Redis by their handles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import redis

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.requests.images import data_of, is_handle, key_of
from petiole.tasks.requests.schemas import Common


def stored(client: redis.Redis, requests: Iterable[Common], ttl_s: int) -> dict[str, bytes]:
    """The images that these requests have handles of, by handle; those that have expired are missing. The others
    are kept for `ttl_s` from now on. Raises redis-py's errors."""
    handles = list(dict.fromkeys(image for one in requests for image in one.images() if is_handle(image)))
    if not handles:
        return {}
    pipe = client.pipeline(transaction=False)
    for handle in handles:
        pipe.get(key_of(handle))
        pipe.expire(key_of(handle), ttl_s)
    found = pipe.execute(raise_on_error=False)[::2]
    return {handle: data for handle, data in zip(handles, found, strict=True) if isinstance(data, bytes)}


def images_of(request: Common, known: Mapping[str, bytes]) -> list[bytes]:
    """The request's images, in order. `known`: those of `stored`. Raises `InvalidRequest`."""
    return [_image(image, known) for image in request.images()]


def _image(image: str, known: Mapping[str, bytes]) -> bytes:
    if not is_handle(image):
        return data_of("image", image)
    if image not in known:
        raise InvalidRequest("image", "must be a handle whose image is still kept: put it again", image)
    return known[image]

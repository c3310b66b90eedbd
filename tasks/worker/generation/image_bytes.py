"""The bytes of the images of tasks: from their messages, or from Redis by their handles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import redis

from petiole.contract.requests.generation import Common
from petiole.contract.requests.images import data_of, handle_of, is_handle
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import image_key


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

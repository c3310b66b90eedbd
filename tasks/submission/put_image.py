"""Storing an image once, for many questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from petiole import _lazy
from petiole.contract.requests import images
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import image_key

if TYPE_CHECKING:
    from petiole.tasks import settings
    from petiole.tasks.servers import connections
else:
    settings = _lazy.module("petiole.tasks.settings")
    connections = _lazy.module("petiole.tasks.servers.connections")


def put_image(data: bytes) -> str:
    """Store an image, the bytes of a JPEG, PNG or WebP file, in the Redis of the streams. Returns a handle. Every
    task takes the handle in place of the image, for `PETIOLE_IMAGE_TTL_S` seconds after its last use.

    Raises InvalidRequest if there are no bytes or too many, and redis-py's errors. An image that is stored already
    is not sent again."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidRequest("image", "must be the bytes of a file", type(data).__name__)
    current = settings.settings()
    data, limit = bytes(data), current.image_max_bytes
    if not 0 < len(data) <= limit:
        raise InvalidRequest("image", f"must have 1 to {limit} bytes", f"{len(data)} bytes")
    handle = images.handle_of(data)
    key, client = image_key(handle), connections.streams()
    if not client.expire(key, current.image_ttl_s):
        client.set(key, data, ex=current.image_ttl_s)
    return handle

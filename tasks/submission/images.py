"""Storing an image once, for many questions."""

from __future__ import annotations

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.requests import images
from petiole.tasks.servers.connections import streams
from petiole.tasks.settings import settings


def put_image(data: bytes) -> str:
    """Store an image, the bytes of a JPEG, PNG or WebP file, in the Redis of the streams. Returns a handle, which
    every task takes in place of the image, for `PETIOLE_IMAGE_TTL_S` seconds after its last use.

    Raises InvalidRequest for no bytes or too many, and redis-py's errors. An image that is stored already is not
    sent again.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidRequest("image", "must be the bytes of a file", type(data).__name__)
    data, limit = bytes(data), settings().image_max_bytes
    if not 0 < len(data) <= limit:
        raise InvalidRequest("image", f"must have 1 to {limit} bytes", f"{len(data)} bytes")
    handle = images.handle_of(data)
    key, client = images.key_of(handle), streams()
    if not client.expire(key, settings().image_ttl_s):
        client.set(key, data, ex=settings().image_ttl_s)
    return handle

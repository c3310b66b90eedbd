"""Which tasks should run on one worker, because the prefix cache of that worker has their beginning.

The key travels in a message's headers. Workers on a Redis broker obey it when they take messages (see
`tasks/worker/broker/lua/take.lua`). On other brokers nobody reads it.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from petiole.contract.requests import images
from petiole.contract.requests.generation import ChatRequest, Common
from petiole.tasks.wire.keys import AFFINITY_HEADER


def key(request: Common) -> str | None:
    """16 hexadecimal digits, the same for all turns of a conversation; None if the task may run anywhere.

    It is made from `affinity`; without it, from the images; without images, from the messages of a chat up to the
    first one of its user. Adapter and salt are part of it, because they separate prefixes in the cache."""
    if request.affinity is not None:
        common: object = request.affinity
    elif found := request.images():
        common = [images.identity("image", image) for image in found]
    elif isinstance(request, ChatRequest):
        roles = [message["role"] for message in request.messages]
        common = request.messages[: roles.index("user") + 1 if "user" in roles else None]
    else:
        return None
    apart = getattr(request, "adapter", None), request.salt
    return blake2b(json.dumps([*apart, common]).encode(), digest_size=8).hexdigest()


def headers(request: Common) -> dict[str, str]:
    """The headers that the affinity adds to the message of this task."""
    made = key(request)
    return {} if made is None else {AFFINITY_HEADER: made}

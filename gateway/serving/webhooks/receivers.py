"""Where each tenant's notices go: see `auth.api_keys`, where its keys stand, too."""

from __future__ import annotations

import msgspec

from petiole.gateway.core.webhook_events import Webhook, problem
from petiole.gateway.serving.auth.api_keys import WEBHOOKS, of_settings
from petiole.gateway.serving.retry import patiently
from petiole.tasks.servers import connections


async def of(tenant: str) -> Webhook | None:
    """None: it has none. Raises `Failure`."""
    if (own := of_settings().webhooks.get(tenant)) is not None:
        return own
    raw = await patiently(lambda: connections.async_streams().hget(WEBHOOKS, tenant))
    return decoded(raw)


def decoded(raw: object) -> Webhook | None:
    """None, too, for what cannot be read: a later version may have written it."""
    try:
        found = msgspec.json.decode(raw, type=Webhook) if isinstance(raw, bytes) else None
    except msgspec.MsgspecError:
        return None
    return found if found is not None and problem(found) is None else None

"""Tokens counted, and made to text, by a worker: the gateway has no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petiole.contract.requests.count import CountDict
from petiole.gateway.core.failures import LATE, unavailable
from petiole.gateway.serving.auth import rate_limits
from petiole.gateway.serving.retry import failure_of
from petiole.tasks.fleet.models import ModelRoute
from petiole.tasks.submission import definitions

WAIT_S = 15.0


async def count_alone(found: ModelRoute, names: Mapping[str, str], **options: Any) -> CountDict:
    """`count`, for a client that asks for nothing else: so the request counts against its limits."""
    await rate_limits.admit_brief(found.queue)
    return await count(found, names, **options)


async def count(found: ModelRoute, names: Mapping[str, str], **options: Any) -> CountDict:
    """What a worker of this model counts. `names`: by an option of the task, the client's field. Raises
    `Failure`."""
    try:
        counted = await definitions.count.adelay(**options, queue=found.queue, expires=WAIT_S)
        return await counted.aget(timeout=WAIT_S)  # type: ignore[no-any-return]
    except LATE:
        raise unavailable("no worker has counted the tokens in time", "no_worker") from None
    except Exception as error:
        raise failure_of(error, names) from error

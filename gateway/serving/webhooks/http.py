"""One try: a POST to the address that was checked, within `WAIT_S` in all. Only the answer's status is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import h11

from petiole.gateway.serving.egress import answered, inner, networks_of, public
from petiole.tasks.settings import settings

WAIT_S = 10.0


class NotTaken(Exception):  # noqa: N818
    """The server has not taken it. The message says why, and nothing of the URL, which may have a secret."""


async def post(url: str, headers: Mapping[str, str], body: bytes) -> None:
    """Raises `NotTaken`."""
    networks = networks_of(settings().gateway_webhook_networks)

    def check(address: str, secure: bool) -> None:
        if not (inner(address, networks) or (secure and public(address))):
            raise NotTaken("its address is not public" if secure else "only inner networks are told without TLS")

    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    try:
        async with asyncio.timeout(WAIT_S):
            status, _ = await answered("POST", url, told, body, check)
    except TimeoutError:
        raise NotTaken(f"no answer within {WAIT_S:g} s") from None
    except (OSError, ValueError, h11.RemoteProtocolError) as error:
        raise NotTaken(type(error).__name__) from None
    if not 200 <= status < 300:
        raise NotTaken(f"status {status}")

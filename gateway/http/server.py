"""`petiole serve`: the application under uvicorn, in one process. Start more of them for more cores: each serves
any request, and goes on with the streams of those that have died."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket

import uvicorn
from starlette.types import Receive, Scope, Send

from petiole import json_text, memory, plain
from petiole.contract.requests.sampling import Sampling
from petiole.contract.requests.validation import validate
from petiole.gateway.anthropic.request import CreateMessage
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.requests import defaults
from petiole.gateway.http.application import app
from petiole.gateway.http.connections import LimitedHttpProtocol
from petiole.gateway.openai.sampling_options import SamplingBody
from petiole.gateway.serving.auth import callers, hosts, manage
from petiole.gateway.serving.request_body import as_request
from petiole.tasks.errors import InvalidRequest, PetioleError
from petiole.tasks.settings import invalid, settings
from petiole.tasks.traces import exporting

LOOPBACK = "127.0.0.1"
KEPT_S = 75
"""How long a connection without a request stays open. Clients keep one for 5 s, load balancers for a minute; so
they close it first, and send no request to a closed connection."""
_OBJECTS = 20_000
"""More than before, after which Python looks for cycles: some MB."""


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    """The application. When the time to drain is over, uvicorn cancels what still runs: its connection is cut, so
    that its client knows that the answer is not whole, and asks another gateway for the rest."""
    with contextlib.suppress(asyncio.CancelledError):
        await app(scope, receive, send)


def run(host: str | None, port: int | None, greeting: str = "") -> int:
    """Serve until a signal ends the process. What is None comes from the settings. `greeting`: printed when it
    serves, with its `{url}`. Raises `PetioleError` if the address cannot be had, or if it must be known whether
    there are keys, and Redis does not say."""
    memory.share_one_heap()
    json_text.bound_integers()
    known = settings()
    callers.KeyCache()  # what is wrong with the settings' keys is said at once
    check_defaults()
    host = known.gateway_host if host is None else host
    if not (hosts.is_loopback(host) or known.gateway_open):
        if known.gateway_jwks_url or manage.any_keys():
            callers.require()
        else:
            print(
                f"no key exists, so this gateway listens on {LOOPBACK} alone, not on {host}. `petiole keys add "
                "NAME` makes a key; then start it again. With PETIOLE_GATEWAY_OPEN=true it serves everybody",
                flush=True,
            )
            host = LOOPBACK
    if known.gateway_hosts or (hosts.is_loopback(host) and not known.gateway_open):
        hosts.guard()
    listening = _listening(host, port)
    plain.install()
    exporting.start("petiole-gateway")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = uvicorn.Config(
        served,
        access_log=False,  # the application writes its own
        log_config=None,
        log_level="warning",
        http=LimitedHttpProtocol,
        server_header=False,
        ws_max_size=known.gateway_max_body_bytes,
        ws_max_queue=1,
        ws_per_message_deflate=False,  # few bytes could become a thousand times as many
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=max(1, round(known.gateway_drain_s)),
    )
    shown = f"[{host}]" if ":" in host else host
    root = f"http://{shown}:{listening.getsockname()[1]}/"
    url = f"{root}v1"
    server = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)  # from now on; uvicorn raises it again when the server has ended
    print(f"serving {url} (a page: {root}){greeting.format(url=url)}", flush=True)
    _collect_less()
    server.run(sockets=[listening])
    return 0


def check_defaults() -> None:
    """Raises `InvalidSettings` for parameters that requests could not have."""
    for pattern, given in defaults().items():
        try:
            if foreign := given.keys() - SamplingBody.DEFAULTED:
                limit = f"must be one of {', '.join(sorted(SamplingBody.DEFAULTED))}"
                raise InvalidRequest(min(foreign), limit, min(foreign))
            validate(Sampling, as_request({"model": pattern, **given}, SamplingBody).sampling())
            told = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
            said = {name: value for name, value in given.items() if name in CreateMessage.DEFAULTED}
            validate(Sampling, as_request({"model": pattern, **told, **said}, CreateMessage).sampling())
        except (Failure, InvalidRequest) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            limit = f"must have parameters that requests may have ({why})"
            raise invalid("gateway_defaults", limit, pattern) from None


def check_address(host: str | None, port: int | None) -> None:
    """Raises `PetioleError` if `run` could not have it: before a model is loaded."""
    _listening(settings().gateway_host if host is None else host, port).close()


def _listening(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    port = settings().gateway_port if port is None else port
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise PetioleError(
            f"--host, --port: must be an address that is free here, got {host}:{port}: {reason}"
        ) from error


def _collect_less() -> None:
    """What a delta makes dies by its count of references. By default Python looks for cycles after each 700
    objects, and so every few deltas. What is there now stays: nothing looks at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS, 20, 20)

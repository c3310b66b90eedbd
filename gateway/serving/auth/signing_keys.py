"""The public keys of an issuer of tokens, as its JWKS URL lists them.

They are fetched at the first token, and again once they are `FRESH_S` old, or if a token names a key that is not
among them: at most once in `PAUSE_S`, whoever asks. A request waits for a fetch only if its key is not known.
While the issuer is away, known keys go on for `KEPT_S`.

Of an answer at most `MOST_BYTES` are read, within `WAIT_S`, and at most `MOST_KEYS` keys are used: those of
`ALGORITHMS`, all of which are asymmetric, of a length that is safe and quickly computed with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import h11
import jwt
import msgspec

from petiole.gateway.core.failures import RETRY_AFTER_S, Failure
from petiole.gateway.serving.egress import answered, public
from petiole.tasks.app.thread_executor import LOOKUPS

logger = logging.getLogger("petiole.gateway")

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
FRESH_S, KEPT_S, PAUSE_S, WAIT_S = 300.0, 86_400.0, 10.0, 5.0
MOST_BYTES, MOST_KEYS = 256 * 2**10, 64
RSA_BITS = range(2048, 8193)
_PUBLIC = ("kty", "n", "e", "crv", "x", "y")
_LONGEST = 2048
"""Characters of a number of a key: one of 8192 bits has 1366."""

Keys = Mapping[tuple[str | None, str], jwt.PyJWK]
"""By the id of a key and an algorithm that it may be used with."""


class _KeySet(msgspec.Struct):
    keys: list[Any]


class SigningKeys:
    """What an event loop knows of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: Keys = {}
        self._fetched_at = self._tried_at = float("-inf")
        self._failed = ""
        self._fetching: asyncio.Task[None] | None = None

    async def of(self, kid: str | None, algorithm: str) -> jwt.PyJWK:
        """The key with this id. Raises `Failure`: 401 if the issuer lists none, 503 if it cannot be asked."""
        key, age_s = self._known(kid, algorithm), time.monotonic() - self._fetched_at
        if key is None or age_s > FRESH_S:
            if self._fetching is None and time.monotonic() - self._tried_at > PAUSE_S:
                self._tried_at = time.monotonic()
                self._fetching = asyncio.create_task(self._fetch())
            if key is None and self._fetching is not None:
                await asyncio.shield(self._fetching)
                key = self._known(kid, algorithm)
        if key is not None:
            return key
        if self._failed:
            told = f"the keys of the tokens' issuer cannot be fetched ({self._failed}); try again"
            raise Failure(503, told, code="issuer_unavailable", retry_after_s=RETRY_AFTER_S)
        told = f"kid: must be a key that the issuer lists for {algorithm}"
        raise Failure(401, f"the token is refused: {told}", code="invalid_token")

    def _known(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        if time.monotonic() - self._fetched_at > KEPT_S:
            return None
        return self._keys.get((kid, algorithm))

    async def _fetch(self) -> None:
        before, self._failed = self._failed, ""
        try:
            async with asyncio.timeout(WAIT_S):
                status, body = await answered(
                    "GET", self._url, {"accept": "application/json"}, b"", _check, MOST_BYTES
                )
            if status != 200:
                raise ValueError(f"status {status}")
            self._keys = await LOOKUPS.run(lambda: dict(_read(body)))
            self._fetched_at = time.monotonic()
        except TimeoutError:
            self._failed = f"no answer within {WAIT_S:g} s"
        except msgspec.MsgspecError:
            self._failed = "the answer must be a JWKS"
        except (OSError, ValueError, RecursionError, h11.RemoteProtocolError) as error:
            self._failed = str(error) if type(error) is ValueError else type(error).__name__
        except Exception as error:
            self._failed = type(error).__name__
        finally:
            self._fetching = None
            if self._failed and self._failed != before:
                logger.warning("PETIOLE_GATEWAY_JWKS_URL cannot be fetched: %s", self._failed)


def _check(address: str, secure: bool) -> None:
    if not secure and public(address):
        raise ValueError("without TLS its address must not be public")


def _read(body: bytes) -> Iterator[tuple[tuple[str | None, str], jwt.PyJWK]]:
    """The keys in a JWKS that can be used. Others are left out."""
    for one in msgspec.json.decode(body, type=_KeySet).keys[:MOST_KEYS]:
        if not isinstance(one, dict) or one.get("use", "sig") != "sig":
            continue
        kid, told = one.get("kid"), {name: one[name] for name in _PUBLIC if name in one}
        if not all(isinstance(value, str) and len(value) <= _LONGEST for value in [*told.values(), kid or ""]):
            continue
        for algorithm in [one["alg"]] if "alg" in one else ALGORITHMS:
            if algorithm in ALGORITHMS and (key := _made(told, algorithm)) is not None:
                yield (kid, algorithm), key


def _made(told: Mapping[str, str], algorithm: str) -> jwt.PyJWK | None:
    try:
        key = jwt.PyJWK(dict(told), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError):  # such as a key of another kind
        return None
    return key if told["kty"] != "RSA" or key.key.key_size in RSA_BITS else None

"""The public keys of an issuer of tokens, as its JWKS URL lists them.

They are fetched at the first token, and again once they are `FRESH_S` old, or if a token names a key that is not
among them: at most once in `PAUSE_S`, whoever asks. A request waits for that, so that a key that was withdrawn is
not taken. While the issuer is away, known keys go on for `KEPT_S`, and nobody who names one waits for `FRESH_S`.

At most `MOST_BYTES` of an answer are read, within `WAIT_S`, and at most `MOST_KEYS` keys are used: those of
`ALGORITHMS`, all of which are asymmetric, of a length that is safe and quickly computed with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

Keys = Mapping[tuple[str | None, str], Sequence[jwt.PyJWK]]
"""By the id of a key, which not each has, and an algorithm that it may be used with."""


class _KeySet(msgspec.Struct):
    keys: list[Any]


class SigningKeys:
    """What an event loop knows of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: Keys = {}
        self._fetched_at = self._tried_at = self._failed_at = float("-inf")
        self._failed = ""
        self._fetching: asyncio.Task[None] | None = None

    async def of(self, kid: str | None, algorithm: str) -> Sequence[jwt.PyJWK]:
        """The keys with this id: without one there may be several. Raises `Failure`: 401 if the issuer lists none,
        503 if it cannot be asked."""
        keys, now = self._known(kid, algorithm), time.monotonic()
        if not keys or now - self._fetched_at > FRESH_S:
            if self._fetching is None and now - self._tried_at > PAUSE_S:
                self._tried_at = now
                self._fetching = asyncio.create_task(self._fetch())
            if self._fetching is not None and (not keys or now - self._failed_at > FRESH_S):
                await asyncio.shield(self._fetching)
                keys = self._known(kid, algorithm)
        if keys:
            return keys
        if self._failed:
            told = f"the keys of the tokens' issuer cannot be fetched ({self._failed}); try again"
            raise Failure(503, told, code="issuer_unavailable", retry_after_s=RETRY_AFTER_S)
        told = f"kid: must be a key that the issuer lists for {algorithm}"
        raise Failure(401, f"the token is refused: {told}", code="invalid_token")

    def _known(self, kid: str | None, algorithm: str) -> Sequence[jwt.PyJWK]:
        if time.monotonic() - self._fetched_at > KEPT_S:
            return ()
        return self._keys.get((kid, algorithm), ())

    async def _fetch(self) -> None:
        before, self._failed = self._failed, ""
        try:
            async with asyncio.timeout(WAIT_S):
                status, body = await answered(
                    "GET", self._url, {"accept": "application/json"}, b"", _check, MOST_BYTES
                )
            if status != 200:
                raise ValueError(f"status {status}")
            self._keys = await LOOKUPS.run(_read, body)
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
            self._failed_at = time.monotonic() if self._failed else float("-inf")
            if self._failed and self._failed != before:
                logger.warning("PETIOLE_GATEWAY_JWKS_URL cannot be fetched: %s", self._failed)


def _check(address: str, secure: bool) -> None:
    if not secure and public(address):
        raise ValueError("without TLS its address must not be public")


def _read(body: bytes) -> Keys:
    """The keys in a JWKS that can be used. Others are left out."""
    found = defaultdict[tuple[str | None, str], list[jwt.PyJWK]](list)
    for one in msgspec.json.decode(body, type=_KeySet).keys[:MOST_KEYS]:
        if not isinstance(one, dict) or one.get("use", "sig") != "sig":
            continue
        kid, told = one.get("kid"), {name: one[name] for name in _PUBLIC if name in one}
        texts = [*told.values(), "" if kid is None else kid]
        if not all(isinstance(value, str) and len(value) <= _LONGEST for value in texts):
            continue
        for algorithm in [one["alg"]] if "alg" in one else ALGORITHMS:
            if algorithm in ALGORITHMS and (key := _made(told, algorithm)) is not None:
                found[kid, algorithm].append(key)
    return dict(found)


def _made(told: Mapping[str, str], algorithm: str) -> jwt.PyJWK | None:
    try:
        key = jwt.PyJWK(dict(told), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError):  # such as a key of another kind
        return None
    return key if told["kty"] != "RSA" or key.key.key_size in RSA_BITS else None

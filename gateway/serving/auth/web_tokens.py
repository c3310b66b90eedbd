"""Finds the caller of a JSON Web Token (JWT), which an issuer has signed: another server's users come with these
in place of keys. PyJWT checks them; the issuer's public keys are `signing_keys`'.

A token's tenant is the one that its claim names. It has the limits of a tenant of this name in Redis or in the
settings; if there is none, it is made, because each tenant needs a salt of its own."""

from __future__ import annotations

import contextlib
import hashlib
import re
from typing import Any

import jwt

from petiole.gateway.core.caller import NAME, RIGHTS, Caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.serving.auth import api_keys
from petiole.gateway.serving.auth.signing_keys import ALGORITHMS, SigningKeys
from petiole.tasks.settings import Settings

LEEWAY_S = 30
"""How far the clocks of issuer and gateway may differ."""
MOST_BYTES = 8192
_FORM = re.compile(r"e[\w-]*\.[\w-]*\.[\w-]*", re.ASCII)
_RIGHT = "petiole:"
_REQUIRED = ("exp", "iss", "aud")


class Tokens:
    """The web tokens of the issuer that the settings name."""

    def __init__(self, known: Settings) -> None:
        self._keys = SigningKeys(known.gateway_jwks_url)
        self._issuer = known.gateway_jwt_issuer
        self._audience = [one.strip() for one in known.gateway_jwt_audience.split(",") if one.strip()]
        self._tenant, self._rights = known.gateway_jwt_tenant, known.gateway_jwt_rights

    @staticmethod
    def is_one(key: str) -> bool:
        return _FORM.fullmatch(key) is not None

    async def caller_of(self, token: str) -> Caller:
        """Raises `Failure`: 401 says which claim is wrong. Raises, too, `msgspec.MsgspecError` if the tenant
        cannot be read."""
        claims = await self._checked(token)
        name = claims.get(self._tenant)
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise _refused(f"{self._tenant}: must be a name of the form {NAME}")
        tenant = await api_keys.tenant(name, new=True)
        assert tenant is not None
        subject = hashlib.sha256(str(claims.get("sub", "")).encode(errors="surrogatepass")).hexdigest()
        expires = int(claims["exp"]) + LEEWAY_S
        return Caller(
            name, f"jwt-{api_keys.name_of(subject)}", tenant, key_expires=expires, rights=self._held(claims)
        )

    async def _checked(self, token: str) -> dict[str, Any]:
        """The claims of a token that the issuer has signed. Raises `Failure`."""
        if len(token) > MOST_BYTES:
            raise _refused(f"must have at most {MOST_BYTES} bytes, got {len(token)}")
        try:
            header = jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
            if algorithm not in ALGORITHMS:
                raise _refused(f"alg: must be one of {', '.join(ALGORITHMS)}")
            for key in await self._keys.of(kid, algorithm):
                with contextlib.suppress(jwt.InvalidSignatureError):
                    return self._signed_by(key, token, algorithm)
            raise _refused("its signature is not that of the key that it names")
        except jwt.ExpiredSignatureError:
            raise _refused("exp: it has expired") from None
        except jwt.ImmatureSignatureError:
            raise _refused("nbf, iat: it is not valid yet") from None
        except jwt.MissingRequiredClaimError as error:
            raise _refused(f"{error.claim}: is required") from None
        except jwt.InvalidIssuerError:
            raise _refused(f"iss: must be {self._issuer}") from None
        except jwt.InvalidAudienceError:
            raise _refused(f"aud: must be {' or '.join(self._audience)}") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise _refused("it is not a signed JSON Web Token") from None

    def _signed_by(self, key: jwt.PyJWK, token: str, algorithm: str) -> dict[str, Any]:
        """The claims. Raises `PyJWTError`."""
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            options={"require": [*_REQUIRED]},
            audience=self._audience,
            issuer=self._issuer,
            leeway=LEEWAY_S,
        )
        return claims

    def _held(self, claims: dict[str, Any]) -> list[str]:
        """A claim has rights as OAuth's `scope` has them, in words, or as a list."""
        told = claims.get(self._rights) if self._rights else None
        words = told.split() if isinstance(told, str) else told if isinstance(told, list) else []
        return [right for right in RIGHTS if _RIGHT + right in words]


def _refused(why: str) -> Failure:
    return Failure(401, f"the token is refused: {why}", code="invalid_token")

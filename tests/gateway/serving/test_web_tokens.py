"""JSON Web Tokens in place of keys: whose they are, and everything that somebody who has none tries."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
import redis
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from petiole.gateway.core.caller import Caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.serving.auth import manage, signing_keys, web_tokens
from petiole.gateway.serving.auth.api_keys import digest_of
from petiole.gateway.serving.auth.callers import KeyCache
from petiole.tasks.errors import InvalidSettings
from petiole.tasks.settings import settings
from tests.support.gateway import Gateway
from tests.support.issuer import AUDIENCE, NAME, Issuer, public, rsa_key
from tests.support.site import RedisServer, eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("tokens"))
    yield server
    server.kill()


@pytest.fixture
def issuer(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    with Issuer() as issuer, redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()
        for name, value in {"PETIOLE_BROKER_URL": server.url, **issuer.settings}.items():
            monkeypatch.setenv(name, value)
        settings.cache_clear()
        yield issuer
    settings.cache_clear()


def asked(*keys: str, cache: KeyCache | None = None) -> list[Caller | Failure]:
    """What a gateway finds for each of these, one after the other."""

    async def each() -> list[Caller | Failure]:
        known, found = cache or KeyCache(), list[Caller | Failure]()
        for key in keys:
            try:
                found.append(await known.of(key))
            except Failure as failure:
                found.append(failure)
        return found

    return asyncio.run(each())


def refusal(key: str) -> str:
    [failure] = asked(key)
    assert isinstance(failure, Failure), failure
    assert (failure.status, failure.code) == (401, "invalid_token")
    return failure.message.removeprefix("the token is refused: ")


# ---------------------------------------------------------------- whose it is


def test_a_token_is_its_tenants(issuer: Issuer) -> None:
    first, again, other = asked(issuer.token(), issuer.token(jti="2"), issuer.token(tenant="globex", sub="b"))
    assert isinstance(first, Caller)
    assert isinstance(other, Caller)
    assert (first.name, first.rights, len(first.tenant.salt)) == ("acme", [], 32)
    assert first == again, "a token of the same subject is the same caller: its retries are its own"
    assert (other.name, other.tenant.salt != first.tenant.salt, other.key != first.key) == ("globex", True, True)
    assert issuer.asked == 1, "the keys are fetched once"
    assert 600 <= first.expires - time.time() <= 600 + web_tokens.LEEWAY_S


def test_a_tenants_limits_are_set_as_all_are(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    manage.change("early", {"models": ["chat"]}, {"requests": 3}, make=True)
    asked(issuer.token())
    manage.change("acme", {}, {"day_tokens": 9})
    for name, of in (("early", ("requests", 3)), ("acme", ("day_tokens", 9))):
        [who] = asked(issuer.token(tenant=name))
        assert isinstance(who, Caller)
        assert getattr(who.tenant.limits, of[0]) == of[1]
    manage.change("acme", {"expires": 1_600_000_000}, {})
    [ended] = asked(issuer.token())
    assert "expired at 2020-09-13" in str(ended)
    document = {"tenants": {"kept": {"salt": "s", "limits": {"concurrent": 2}}}}
    monkeypatch.setenv("PETIOLE_GATEWAY_KEYS", json.dumps(document))
    settings.cache_clear()
    [who] = asked(issuer.token(tenant="kept"))
    assert isinstance(who, Caller)
    assert (who.tenant.salt, who.tenant.limits.concurrent) == ("s", 2)


def test_keys_go_on_beside_tokens_and_one_of_them_is_needed(issuer: Issuer) -> None:
    key, _ = manage.add("globex", {}, {}, {})
    found, unknown = asked(key, "ptl-unknown")
    assert isinstance(found, Caller)
    assert found.name == "globex"
    assert "not known" in str(unknown)
    with pytest.raises(Failure, match="a key is needed"):
        asyncio.run(KeyCache().of(None))
    assert issuer.asked == 0


@pytest.mark.parametrize(
    ("told", "rights"),
    [("openid petiole:admin", ["admin"]), (["petiole:admin", 7], ["admin"]), ("admin", []), (None, []), (7, []),
     ({"petiole:admin": 1}, []), ("petiole:admins petiole:none", [])],
)  # fmt: skip
def test_rights_are_those_of_a_claim_that_a_setting_names(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, told: Any, rights: list[str]
) -> None:
    [without] = asked(issuer.token(scope="petiole:admin"))
    monkeypatch.setenv("PETIOLE_GATEWAY_JWT_RIGHTS", "scope")
    settings.cache_clear()
    [who] = asked(issuer.token(scope=told))
    assert isinstance(without, Caller)
    assert isinstance(who, Caller)
    assert (without.rights, who.rights) == ([], rights)


@pytest.mark.parametrize("tenant", ["", "a/b", "../acme", "acme\n", "ä", "a" * 65, 7, None, ["acme"], {"a": 1}])
def test_a_claim_that_is_no_name_of_a_tenant(issuer: Issuer, tenant: Any) -> None:
    assert refusal(issuer.token(tenant=tenant)).startswith(
        "tenant: must be a name of the form [A-Za-z0-9_-]{1,64}"
    )


@pytest.mark.parametrize("algorithm", signing_keys.ALGORITHMS)
def test_each_asymmetric_algorithm_is_taken(issuer: Issuer, algorithm: str) -> None:
    curves = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
    if algorithm in curves:
        issuer.rotate(ec.generate_private_key(curves[algorithm]))
    else:
        issuer.rotate(ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else rsa_key())
    [who] = asked(issuer.token(algorithm=algorithm))
    assert isinstance(who, Caller), who


def test_a_token_that_expires_while_it_is_known_is_told_so(issuer: Issuer) -> None:
    ended, cache = issuer.token(exp=1_600_000_000), KeyCache()
    cache._known[digest_of(ended)] = float("inf"), Caller("acme", key_expires=1_600_000_030)
    [refused] = asked(ended, cache=cache)
    assert isinstance(refused, Failure)
    assert (refused.code, refused.message) == ("invalid_token", "the token is refused: exp: it has expired")


# ---------------------------------------------------------------- who has none


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": 1_600_000_000}, "exp: it has expired"),
        ({"exp": int(time.time()) - web_tokens.LEEWAY_S - 5}, "exp: it has expired"),
        ({"exp": None}, "exp: is required"),
        ({"exp": 1e400}, "it is not a signed JSON Web Token"),
        ({"exp": "soon"}, "it is not a signed JSON Web Token"),
        ({"nbf": int(time.time()) + 3600}, "nbf, iat: it is not valid yet"),
        ({"iat": int(time.time()) + 3600}, "nbf, iat: it is not valid yet"),
        ({"iss": "https://issuer.example"}, f"iss: must be {NAME}"),
        ({"iss": None}, "iss: is required"),
        ({"aud": "other"}, f"aud: must be {AUDIENCE}"),
        ({"aud": ["other", f"{AUDIENCE}2"]}, f"aud: must be {AUDIENCE}"),
        ({"aud": None}, "aud: is required"),
        ({"aud": {"petiole": 1}}, f"aud: must be {AUDIENCE}"),
    ],
)
def test_each_claim_is_checked_and_named(issuer: Issuer, claims: dict[str, Any], why: str) -> None:
    assert refusal(issuer.token(**claims)) == why


def test_clocks_may_differ_by_half_a_minute(issuer: Issuer) -> None:
    now = int(time.time())
    late, early = asked(issuer.token(exp=now - 15), issuer.token(nbf=now + 15, iat=now + 15))
    assert isinstance(late, Caller)
    assert isinstance(early, Caller)


def part(value: Any) -> str:
    return (
        base64.urlsafe_b64encode(value if isinstance(value, bytes) else json.dumps(value).encode())
        .decode()
        .rstrip("=")
    )


def forged(issuer: Issuer, header: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """A token of this header, with the issuer's claims."""
    claims = issuer.token(ec.generate_private_key(ec.SECP256R1())).split(".")[1]
    signed = f"{part(header)}.{claims}"
    return f"{signed}.{part(sign(signed.encode()))}"


def test_no_secret_of_both_sides_is_taken_for_a_signature(issuer: Issuer) -> None:
    """An HMAC with the public key, which everybody has, is the oldest trick; `none` is the shortest."""
    issuer.rotate(rsa_key())
    key: Any = issuer.key.public_key()
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    issuer.listed.append({"kty": "oct", "k": part(b"x" * 32), "kid": "secret", "alg": "HS256"})
    for secret, kid in (
        (pem, issuer.kid),
        (json.dumps(issuer.listed[-2]).encode(), issuer.kid),
        (b"x" * 32, "secret"),
    ):
        for alg, digest in (("HS256", "sha256"), ("HS512", "sha512"), ("hs256", "sha256")):
            made = forged(
                issuer, {"alg": alg, "kid": kid}, lambda told, s=secret, d=digest: hmac.digest(s, told, d)
            )
            assert refusal(made).startswith("alg: must be one of RS256"), alg
    for alg in ("none", "None", "NONE", "", None, ["RS256"], "ES256K"):
        assert refusal(forged(issuer, {"alg": alg, "kid": issuer.kid}, lambda told: b"")).startswith(
            "alg: must be"
        )
    made = forged(issuer, {"alg": "RS256", "kid": "secret"}, lambda told: hmac.digest(b"x" * 32, told, "sha256"))
    assert refusal(made) == "kid: must be a key that the issuer lists for RS256"
    assert refusal(forged(issuer, {"alg": "RS256", "kid": issuer.kid}, lambda told: b"")).startswith(
        "its signature"
    )


def test_a_key_of_the_tokens_own_is_not_looked_at(issuer: Issuer) -> None:
    own = ec.generate_private_key(ec.SECP256R1())
    with Issuer() as other:
        for headers in (
            {},
            {"jwk": public(own)},
            {"jku": other.url, "x5u": other.url},
            {"x5c": [part(b"x")]},
        ):
            assert (
                refusal(issuer.token(own, headers=headers)) == "its signature is not that of the key that it names"
            )
        assert refusal(other.token(headers={"jku": other.url, "kid": "of-another"})).startswith("kid: must be")
        assert other.asked == 0
    issuer.rotate()
    assert refusal(issuer.token(headers={"kid": "key-0"})).startswith("its signature"), "of one key, named another"


@pytest.mark.parametrize(
    "kid", ["../../etc/passwd", "' OR 1=1 --", "/dev/null", "key-0\x00", "", "x" * 4000, None]
)
def test_a_kid_is_looked_up_and_nothing_else(issuer: Issuer, kid: str | None) -> None:
    assert refusal(issuer.token(headers={"kid": kid})) == "kid: must be a key that the issuer lists for ES256"


@pytest.mark.parametrize("kid", [7, ["key-0"], {"key-0": 1}])
def test_a_kid_that_is_no_text(issuer: Issuer, kid: Any) -> None:
    assert (
        refusal(forged(issuer, {"alg": "ES256", "kid": kid}, lambda told: b"x"))
        == "it is not a signed JSON Web Token"
    )


def test_what_is_critical_and_not_known_is_refused(issuer: Issuer) -> None:
    assert refusal(issuer.token(headers={"crit": ["exp"]})) == "it is not a signed JSON Web Token"
    assert refusal(forged(issuer, {"alg": "ES256", "kid": issuer.kid, "b64": False}, lambda told: b"x")) == (
        "it is not a signed JSON Web Token"
    )


@pytest.mark.parametrize("nested", ["[" * 3000, '{"a":' * 600])
def test_a_token_that_is_large_or_deep(issuer: Issuer, nested: str) -> None:
    assert refusal(issuer.token(more="x" * 9000)).startswith(
        f"must have at most {web_tokens.MOST_BYTES} bytes, got "
    )
    deep = part(nested.encode())
    for made in (
        f"e{deep[1:]}.{deep}.{part(b'x')}",
        f"{part({'alg': 'ES256', 'kid': issuer.kid})}.{deep}.{part(b'x')}",
    ):
        assert refusal(made) in (
            "it is not a signed JSON Web Token",
            "its signature is not that of the key that it names",
        )


def test_a_changed_token_is_refused(issuer: Issuer) -> None:
    header, claims, signature = issuer.token().split(".")
    other = part({**jwt.decode(issuer.token(), options={"verify_signature": False}), "tenant": "globex"})
    for made in (
        f"{header}.{other}.{signature}",
        f"{header}.{claims}.{signature[:-4]}AAAA",
        f"{header}.{claims}.e",
    ):
        assert refusal(made) in (
            "it is not a signed JSON Web Token",
            "its signature is not that of the key that it names",
        )
    [unknown] = asked(f"{header}.{claims}")
    assert "not known" in str(unknown), "it is no token"


# ---------------------------------------------------------------- the issuer's keys


def test_a_new_key_is_found_and_strangers_make_no_flood(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, old = KeyCache(), issuer.token()

    async def all_of() -> None:
        assert (await cache.of(old)).name == "acme"
        issuer.rotate()
        with pytest.raises(Failure, match="kid: must be a key that the issuer lists"):
            await cache.of(issuer.token())  # the last look was just now
        monkeypatch.setattr(signing_keys, "PAUSE_S", 0.0)
        assert (await cache.of(issuer.token())).name == "acme"
        assert issuer.asked == 2
        monkeypatch.setattr(signing_keys, "PAUSE_S", 60.0)
        strangers = [issuer.token(headers={"kid": f"k{number}"}) for number in range(50)]
        told = await asyncio.gather(*map(cache.of, strangers), return_exceptions=True)
        assert {one.status for one in told if isinstance(one, Failure)} == {401}
        assert (await cache.of(issuer.token(sub="x"))).name == "acme"
        assert issuer.asked == 2

    asyncio.run(all_of())


def test_many_that_come_first_wait_for_one_look(issuer: Issuer) -> None:
    async def at_once() -> None:
        cache = KeyCache()
        found = await asyncio.gather(*(cache.of(issuer.token(sub=str(number))) for number in range(50)))
        assert {one.name for one in found} == {"acme"}

    asyncio.run(at_once())
    assert issuer.asked == 1


def test_while_the_issuer_is_away_its_known_keys_go_on(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing_keys, "PAUSE_S", 0.0)
    monkeypatch.setattr(signing_keys, "FRESH_S", -1.0)

    async def all_of() -> None:
        cache = KeyCache()
        assert (await cache.of(issuer.token())).name == "acme"
        issuer.close()
        for number in range(3):
            assert (await cache.of(issuer.token(sub=str(number)))).name == "acme"
        with pytest.raises(Failure, match=r"cannot be fetched \(ConnectionRefusedError\)") as unknown:
            await cache.of(issuer.token(headers={"kid": "new"}))
        assert (unknown.value.status, unknown.value.code) == (503, "issuer_unavailable")
        with monkeypatch.context() as later:
            later.setattr(signing_keys, "KEPT_S", -1.0)
            with pytest.raises(Failure, match="cannot be fetched"):
                await cache.of(issuer.token(sub="later"))

    asyncio.run(all_of())
    with Issuer() as again:
        again.listed, again.key = issuer.listed, issuer.key
        monkeypatch.setenv("PETIOLE_GATEWAY_JWKS_URL", again.url)
        settings.cache_clear()
        [who] = asked(again.token())
        assert isinstance(who, Caller), "its successor is asked"


def test_a_key_that_was_withdrawn_is_refused_once_the_known_ones_are_old(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing_keys, "PAUSE_S", 0.0)

    async def all_of() -> None:
        cache, old = KeyCache(), issuer.key
        tokens = [issuer.token(old, sub=str(number)) for number in range(20)]
        assert (await cache.of(issuer.token())).name == "acme"
        issuer.listed.clear()
        assert (await cache.of(issuer.token())).name == "acme", "they were fetched just now"
        monkeypatch.setattr(signing_keys, "FRESH_S", 0.0)
        told = await asyncio.gather(*map(cache.of, tokens), return_exceptions=True)
        assert {one.status for one in told if isinstance(one, Failure)} == {401}
        assert not [one for one in told if isinstance(one, Caller)], "whoever comes meanwhile waits, too"

    asyncio.run(all_of())


def test_nobody_waits_for_an_issuer_that_did_not_answer_the_last_time(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing_keys, "PAUSE_S", 0.0)

    async def all_of() -> None:
        cache = KeyCache()
        assert (await cache.of(issuer.token())).name == "acme"
        issuer.answer = 500, b""
        with monkeypatch.context() as later:
            later.setattr(signing_keys, "FRESH_S", 0.0)
            assert (await cache.of(issuer.token(sub="a"))).name == "acme", "it waits, and the known key goes on"
        assert cache._tokens is not None
        cache._tokens._keys._fetched_at -= signing_keys.FRESH_S
        issuer.open.clear()
        assert (await asyncio.wait_for(cache.of(issuer.token(sub="b")), signing_keys.WAIT_S / 2)).name == "acme"
        issuer.open.set()
        issuer.answer = None

    asyncio.run(all_of())


def test_keys_without_an_id_are_all_tried(issuer: Issuer) -> None:
    first, second, third = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    issuer.listed = [public(first), public(second)]
    one, other, stranger = asked(*(issuer.token(key, headers={"kid": None}) for key in (first, second, third)))
    assert isinstance(one, Caller)
    assert isinstance(other, Caller)
    assert "its signature is not that of the key that it names" in str(stranger)
    [ended] = asked(issuer.token(first, headers={"kid": None}, exp=1_600_000_000))
    assert "exp: it has expired" in str(ended)


def deep(depth: int) -> bytes:
    return b'{"keys": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"{}", "status 500"),
        (302, b'{"keys": []}', "status 302"),
        (200, b"", "the answer must be a JWKS"),
        (200, b"\xff\xfe", "the answer must be a JWKS"),
        (200, b"[]", "the answer must be a JWKS"),
        (200, b'{"keys": {"kid": "key-0"}}', "the answer must be a JWKS"),
        (200, b'{"keys": [' + b" " * signing_keys.MOST_BYTES + b"]}", "the answer must have at most 262144 bytes"),
        (200, deep(100_000), "RecursionError"),
    ],
    ids=["fails", "elsewhere", "nothing", "no text", "a list", "an object", "a bomb", "deep"],
)
def test_an_answer_that_is_no_list_of_keys(issuer: Issuer, status: int, body: bytes, why: str) -> None:
    issuer.answer = status, body
    [failure] = asked(issuer.token())
    assert isinstance(failure, Failure)
    assert (failure.status, failure.code) == (503, "issuer_unavailable")
    assert f"({why})" in failure.message


def test_an_issuer_that_does_not_answer_holds_up_others_for_no_longer_than_a_time(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing_keys, "WAIT_S", 0.2)
    key, _ = manage.add("globex", {}, {}, {})
    issuer.open.clear()

    async def both() -> None:
        cache = KeyCache()
        waits = asyncio.create_task(cache.of(issuer.token()))
        while not issuer.asked:
            await asyncio.sleep(0.001)
        assert (await cache.of(key)).name == "globex"
        assert not waits.done(), "others are answered meanwhile"
        with pytest.raises(Failure, match=r"no answer within 0\.2 s"):
            await waits

    asyncio.run(both())


@pytest.mark.filterwarnings("ignore::jwt.InsecureKeyLengthWarning")
def test_keys_that_no_signature_should_be_of_are_left_out(issuer: Issuer) -> None:
    small, good = rsa_key(1024), rsa_key()
    huge = part(b"\xff" * 2**17)
    no_text: list[Any] = [["list"], [], {}, 0, False]
    listed: list[Any] = [
        *([{"kid": "many", **public(good)}] * 3),
        {**public(small), "kid": "small"},
        {"kty": "RSA", "n": huge, "e": "AQAB", "kid": "huge"},
        {"kty": "RSA", "n": 7, "e": "AQAB", "kid": "number"},
        {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA", "kid": "curve"},
        {"kty": "EC", "crv": "P-256", "x": part(b"\1" * 32), "y": part(b"\1" * 32), "kid": "off the curve"},
        {**public(good), "use": "enc", "kid": "encryption"},
        {**public(good), "alg": "RS512", "kid": "one algorithm"},
        *({**public(good), "kid": kid} for kid in no_text),
        {"kty": None}, {}, [], None, "key", 7,
        {**public(good), "kid": "good"},
    ]  # fmt: skip
    issuer.listed = listed
    for kid in ("small", "huge", "number", "curve", "off the curve", "encryption", "one algorithm"):
        key = small if kid == "small" else good
        assert refusal(issuer.token(key, "RS256", {"kid": kid})).startswith("kid: must be"), kid
    issuer.listed += [{"kid": f"k{number}"} for number in range(1000)]
    [who] = asked(issuer.token(good, "PS256", {"kid": "good"}))
    assert isinstance(who, Caller)
    issuer.listed.insert(0, {**public(good), "alg": "RS256"})
    [who] = asked(issuer.token(good, "RS256", {"kid": None}))
    assert isinstance(who, Caller), "neither the key nor the token has a name"


def test_a_private_key_that_is_listed_is_used_as_a_public_one(issuer: Issuer) -> None:
    good = rsa_key()
    algorithm: Any = jwt.algorithms.RSAAlgorithm
    issuer.listed = [{**algorithm.to_jwk(good, as_dict=True), "kid": "good"}]
    [who] = asked(issuer.token(good, "RS256", {"kid": "good"}))
    assert isinstance(who, Caller)


# ---------------------------------------------------------------- settings, and a gateway


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("JWKS_URL", "ftp://issuer.example/", "must be an https URL"),
        ("JWKS_URL", "issuer.example/keys", "must be an https URL"),
        ("JWKS_URL", "https://issuer.example/ä", "must be an https URL"),
        ("JWT_ISSUER", "", "must be given with PETIOLE_GATEWAY_JWKS_URL"),
        ("JWT_AUDIENCE", " , ", "must be given with PETIOLE_GATEWAY_JWKS_URL"),
        ("JWT_TENANT", "", "must have at least 1 character"),
    ],
)
def test_settings_of_tokens_are_whole(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(f"PETIOLE_GATEWAY_{name}", value)
    settings.cache_clear()
    with pytest.raises(InvalidSettings, match=f"PETIOLE_GATEWAY_{name}: {why}"):
        settings()


def test_without_pyjwt_it_says_what_to_install(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    for name in ("web_tokens", "signing_keys"):
        monkeypatch.delitem(sys.modules, f"petiole.gateway.serving.auth.{name}")
    with pytest.raises(InvalidSettings, match=r"PETIOLE_GATEWAY_JWKS_URL: must be empty without 'petiole\[jwt\]'"):
        KeyCache()


def test_without_tls_only_an_inner_address_is_asked(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_GATEWAY_JWKS_URL", "http://93.184.216.34/keys.json")
    settings.cache_clear()
    [failure] = asked(issuer.token())
    assert "without TLS its address must not be public" in str(failure)


@pytest.mark.e2e
def test_a_gateway_takes_tokens(issuer: Issuer, server: RedisServer, tmp_path: Path) -> None:
    told = {"PETIOLE_BROKER_URL": server.url, **issuer.settings}
    with Gateway(tmp_path, host="0.0.0.0", **told) as gateway, httpx2.Client(base_url=gateway.url) as http:
        assert gateway.url.startswith("http://0.0.0.0:"), "an issuer is as good as a key"

        def status(token: str, path: str = "/models") -> int:
            return http.get(path, headers={"authorization": f"Bearer {token}"}).status_code

        assert http.get("/models").status_code == 401
        assert status(issuer.token()) == 200
        assert status(issuer.token(aud="other")) == 401
        ending = issuer.token(exp=int(time.time()) - web_tokens.LEEWAY_S + 2)
        assert status(ending) == 200
        eventually(lambda: status(ending) == 401, "it ends also while it is remembered")
        issuer.close()
        assert status(issuer.token(sub="later")) == 200
        assert hashlib.sha256(issuer.token().encode()).hexdigest() not in gateway.output
        assert "eyJ" not in gateway.output

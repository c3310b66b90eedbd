"""The settings of `petiole serve`. They are part of `settings.Settings`, so that `petiole settings` lists them;
the gateway itself, which stands above `tasks`, reads them from there."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, ValidationInfo, field_validator

_LONGEST_S = 10**9


class GatewaySettings(BaseModel):
    """What a gateway is told. All of a fleet's gateways should have the same."""

    gateway_host: str = Field(
        default="127.0.0.1", min_length=1, description="address on which the gateway listens"
    )
    gateway_port: int = Field(default=8000, ge=0, le=65_535, description="its port; 0: a free one")
    gateway_keys: SecretStr = Field(
        default=SecretStr(""),
        description="keys and their tenants, as JSON, beside those that `petiole keys` makes",
    )
    gateway_jwks_url: str = Field(
        default="", description="keys (JWKS) of an issuer whose JSON Web Tokens are taken for keys; empty: none"
    )
    gateway_jwt_issuer: str = Field(default="", validate_default=True, description="their iss")
    gateway_jwt_audience: str = Field(
        default="", validate_default=True, description="their aud, or several with commas"
    )
    gateway_jwt_tenant: str = Field(
        default="tenant", min_length=1, description="their claim that names the tenant"
    )
    gateway_jwt_rights: str = Field(
        default="", description="their claim with rights, such as scope; empty: tokens have none"
    )
    gateway_open: bool = Field(
        default=False, description="listen on every address, although no key exists; otherwise on loopback alone"
    )
    gateway_origins: str = Field(
        default="", description="web pages that may call it, such as https://app.example.com; empty: none"
    )
    gateway_hosts: str = Field(
        default="",
        description="names by which a gateway without keys is called, beside those of loopback; *: any",
    )
    gateway_most_queued: int = Field(
        default=0, ge=0, description="tasks in a queue beyond which further ones are answered 429; 0: any number"
    )
    gateway_most_wait_s: float = Field(
        default=0.0, ge=0, le=_LONGEST_S, description="expected wait beyond which the answer is 429; 0: any"
    )
    gateway_max_body_bytes: int = Field(
        default=64 * 2**20, ge=1024, le=2**30, description="largest body of an HTTP request"
    )
    gateway_receive_s: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="longest arrival of a request, beside a second for each 1,000 bytes",
    )
    gateway_files: str = Field(
        default="",
        description="folder or URL, such as s3://bucket/files, of /v1/files, which gateways and workers share; "
        "empty: none",
    )
    gateway_max_file_bytes: int = Field(
        default=200 * 2**20, ge=1024, le=2**40, description="largest file of /v1/files"
    )
    gateway_prepared_s: float = Field(
        default=5.0,
        ge=0,
        le=3600,
        description="how long the headers of a stream wait for a worker to accept the request",
    )
    gateway_wait_for_worker_s: float = Field(
        default=60.0,
        ge=0,
        le=_LONGEST_S,
        description="how long a request waits while no worker serves its model",
    )
    gateway_image_hosts: str = Field(
        default="",
        description="hosts from which images are fetched, such as cdn.example.com,*.example.org; empty: none",
    )
    gateway_webhook_networks: str = Field(
        default="",
        description="networks to which webhooks may go, although not public, such as 10.0.0.0/8; empty: none",
    )
    gateway_unread_s: float = Field(
        default=15.0,
        ge=3,
        le=3600,
        description="a generation whose client has gone is cancelled after this many seconds",
    )
    gateway_stored_stay: bool = Field(
        default=True, description="whether a generation with store goes on when its client has gone"
    )
    gateway_reasoning: Literal["both", "reasoning", "reasoning_content"] = Field(
        default="both", description="under which names chat/completions shows reasoning"
    )
    gateway_unknown: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="unknown parameters: ignored and named in the answer, if they promise nothing; or refused",
    )
    gateway_defaults: str = Field(
        default="",
        description="sampling of requests that do not say it, by patterns of models, such as "
        '{"qwen3*": {"temperature": 0.6}}',
    )
    gateway_heartbeat_s: float = Field(
        default=10.0, ge=1, le=3600, description="longest silence of a stream: then a comment is sent"
    )
    gateway_keep_s: int = Field(
        default=86_400, ge=60, le=_LONGEST_S, description="seconds that a request can be asked for by its id"
    )
    gateway_drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="how long running answers may go on when the gateway is stopped"
    )

    @field_validator("gateway_jwks_url")
    @classmethod
    def _is_asked(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and not (parts.scheme in ("http", "https") and parts.hostname and re.fullmatch("[!-~]+", value)):
            raise ValueError("must be an https URL, or an http URL of an inner network")
        return value

    @field_validator("gateway_jwt_issuer", "gateway_jwt_audience")
    @classmethod
    def _is_checked(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("gateway_jwks_url") and not value.strip(", "):
            raise ValueError("must be given with PETIOLE_GATEWAY_JWKS_URL")
        return value

    @field_validator("gateway_webhook_networks")
    @classmethod
    def _are_networks(cls, value: str) -> str:
        for one in filter(None, map(str.strip, value.split(","))):
            try:
                ipaddress.ip_network(one)
            except ValueError:
                raise ValueError("must be networks such as 10.0.0.0/8,fd00::/8") from None
        return value

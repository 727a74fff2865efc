"""Settings of the admin service."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr

from penstock.api.settings import GuardedSettings
from penstock.shared.common.settings import HttpSettings, PositiveMs


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// address")
    try:
        _ = parts.port
    except ValueError as e:
        raise ValueError(f"must be an http:// or https:// address: {e}") from None
    # `urlsplit` removes line ends, as at the end of a file.
    return parts.geturl().rstrip("/")


class AdminServiceSettings(GuardedSettings):
    """The admin service: offsets, groups and topics over HTTP, and the dashboard."""

    http: HttpSettings = HttpSettings(port=8084)
    services: dict[str, Annotated[str, AfterValidator(_http_url)]] = Field(
        default={}, description="addresses of the other services by name, for the dashboard"
    )
    services_auth_token: SecretStr | None = Field(default=None, description="bearer token for the other services")
    services_timeout_ms: PositiveMs = Field(default=2_000, description="how long a service may take to answer")

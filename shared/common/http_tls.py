"""The TLS context that HTTP clients share."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def client_tls() -> ssl.SSLContext:
    """Return the TLS context of HTTP clients. It is made once: reading the CA certificates takes 20 ms of CPU."""
    return httpx.create_ssl_context(trust_env=False)

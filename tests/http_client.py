"""HTTP clients for the servers that tests start."""

from __future__ import annotations

from typing import Any

import httpx

from penstock.shared.common.http_tls import client_tls


def http_client(**given: Any) -> httpx.AsyncClient:
    """A client that uses no proxy. All share one TLS context: to read the certificates takes 20 ms of CPU."""
    return httpx.AsyncClient(trust_env=False, verify=client_tls(), **given)

"""Access control: credentials with scopes, and the scope that each request needs.

Sans-IO. A credential is a name and a secret. The secret alone is a bearer token; name and secret are basic auth.
Every secret is compared, in constant time, so the response time reveals nothing.

| scope | what it allows |
|---|---|
| ingest | storing events and records, by any of the interfaces |
| read | requests that change nothing |
| admin | all other requests, and those of `read` |

>>> scope_of("POST", "/v1/topics/t/events"), scope_of("GET", "/v1/groups"), scope_of("DELETE", "/v1/groups/g")
('ingest', 'read', 'admin')
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import SecretStr

from penstock.api.settings import Credential, Scope

_INGEST = re.compile(
    r"/v1/topics/[^/]+/events|/topics/[^/]+(/partitions/[^/]+)?|/v3/clusters/[^/]+/topics/[^/]+/records(:batch)?"
)
READING = frozenset({"GET", "HEAD", "OPTIONS"})
OWNER = "owner"
"""The name of a client with `auth_token`, which has all scopes."""


class Principal(NamedTuple):
    """A client and its scopes."""

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Return whether the client may send a request that needs the scope. The scope admin includes read."""
        return scope in self.scopes or (scope == "read" and "admin" in self.scopes)


ALL: frozenset[Scope] = frozenset({"ingest", "read", "admin"})


class Access:
    """The credentials of a service. Without credentials every client is anonymous and has all scopes."""

    def __init__(self, auth_token: SecretStr | None, credentials: Mapping[str, Credential]) -> None:
        self._known: list[tuple[Principal, bytes]] = [
            (Principal(name, frozenset(credential.scopes)), credential.secret.get_secret_value().encode())
            for name, credential in credentials.items()
        ]
        if auth_token is not None:
            self._known.append((Principal(OWNER, ALL), auth_token.get_secret_value().encode()))

    def __repr__(self) -> str:
        return f"Access({[principal.name for principal, _ in self._known]})"

    @property
    def is_open(self) -> bool:
        """Whether no request needs credentials."""
        return not self._known

    @property
    def has_names(self) -> bool:
        """Whether basic auth is possible: at least one credential has a name."""
        return any(principal.name != OWNER for principal, _ in self._known)

    def principal(self, authorization: str) -> Principal | None:
        """Return the client that an Authorization header belongs to; None if the credentials are unknown."""
        scheme, _, value = authorization.partition(" ")
        client = None
        # No early exit: the time must not depend on which secret matches.
        if scheme.lower() == "bearer":
            token = value.strip().encode()
            for principal, secret in self._known:
                if hmac.compare_digest(token, secret):
                    client = principal
        elif scheme.lower() == "basic" and (user_and_password := _basic_credentials(value)) is not None:
            user, password = user_and_password
            for principal, secret in self._known:
                matches = hmac.compare_digest(password, secret) & hmac.compare_digest(user, principal.name.encode())
                if matches and principal.name != OWNER:
                    client = principal
        return client


def scope_of(method: str, path: str) -> Scope:
    """Return the scope that a request needs."""
    if method in READING:
        # Clients of REST Proxy v3 request the cluster's id before they store records.
        return "ingest" if path == "/v3/clusters" else "read"
    return "ingest" if method == "POST" and _INGEST.fullmatch(path) else "admin"


def _basic_credentials(value: str) -> tuple[bytes, bytes] | None:
    """Return the user and the password of basic auth (RFC 7617); None if the value is malformed."""
    try:
        name, colon, secret = base64.b64decode(value.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (name, secret) if colon else None

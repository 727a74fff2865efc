"""Query parameters for keys: `key` is text, `key_base64` is bytes. `key_from` and `key_to` have the same two forms.

A store's keys are text or bytes, and each kind can be queried in either form: text is UTF-8. Answers contain bytes as
base64.

>>> keys = requested_keys(key="ann", key_from_base64="_wE=")
>>> keys["key"], keys["key_from"], keys["key_to"]
('ann', b'\\xff\\x01', None)
>>> encode_query_params(keys)
{'key': 'ann', 'key_from_base64': '/wE='}
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from fastapi import Query
from pydantic import Field

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import BAD_REQUEST
from penstock.shared.common.key_range import key_of_base64

Key = str | bytes | None
SUFFIX = "_base64"
WRONG_KEY = ErrorKind(BAD_REQUEST, "INVALID_KEY", "Invalid key")

_Base64 = Annotated[
    str | None, Query(examples=["_wE="], description="the same as bytes, in base64 (or URL-safe base64)")
]


class Keys(TypedDict):
    """A key, or the bounds of a range of keys; None if not given."""

    key: Key
    key_from: Key
    key_to: Key


class StoreQueryParams(Keys):
    """The query of a store's rows by key, and of windows that end at `from_ms` or later and begin at `to_ms` or
    earlier.

    Times are ms since the epoch; None is no bound. `rows_max` limits one response. `continuation` is that of the
    previous response, or None for the first.
    """

    from_ms: int | None
    to_ms: int | None
    rows_max: int
    continuation: str | None


ContinuationOf = Annotated[str, Field(examples=["ksQIvFdNQITdTE6TAMQDYW5uBQ"])]
Continuation = Annotated[
    ContinuationOf | None, Query(description="continuation of the previous response to the same query")
]


def requested_keys(
    key: Annotated[str | None, Query(examples=["UA"], description="only this key")] = None,
    key_from: Annotated[str | None, Query(examples=["A"], description="only keys from here on")] = None,
    key_to: Annotated[str | None, Query(examples=["Z"], description="only keys up to here")] = None,
    key_base64: _Base64 = None,
    key_from_base64: _Base64 = None,
    key_to_base64: _Base64 = None,
) -> Keys:
    """Return the keys of a request.

    Raises Problem (400) for a key given both as text and as base64, and for invalid base64.
    """
    return Keys(
        key=_key_of_parameter("key", key, key_base64),
        key_from=_key_of_parameter("key_from", key_from, key_from_base64),
        key_to=_key_of_parameter("key_to", key_to, key_to_base64),
    )


def encode_query_params(query: Mapping[str, Any]) -> dict[str, Any]:
    """Return the query parameters of the same query to another instance. Bytes are base64."""
    params: dict[str, Any] = {}
    for name, value in query.items():
        if isinstance(value, bytes):
            params[f"{name}{SUFFIX}"] = base64.b64encode(value).decode()
        elif value is not None:
            params[name] = value
    return params


def _key_of_parameter(name: str, text: str | None, encoded: str | None) -> Key:
    """Return the value of a key parameter in either form."""
    if encoded is None:
        return text
    if text is not None:
        raise Problem(WRONG_KEY, f"{name} and {name}{SUFFIX} cannot be combined; use one of them")
    try:
        return key_of_base64(encoded)
    except ValueError as e:
        raise Problem(WRONG_KEY, f"{name}{SUFFIX}: {encoded!r} {e}") from None

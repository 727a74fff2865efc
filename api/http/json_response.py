"""JSON responses of plain values: dicts, lists, msgspec structs and what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from penstock.api.http.status_codes import OK

JSON_TYPE = "application/json"


def json_response(body: Any, status: int = OK, headers: Mapping[str, str] | None = None) -> Response:
    """Return a plain value as a JSON response."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), JSON_TYPE)

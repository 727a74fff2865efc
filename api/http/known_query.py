"""Rejects unknown query parameters under `/v1`, and names the nearest parameter of the route.

Without this check a misspelled `?atomic=true` would store events one by one. The routes of REST Proxy and Kafka Connect
ignore unknown parameters, as their originals do. A forwarded route is not in the schema. The service that receives the
request checks it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status import BAD_REQUEST
from penstock.shared.common.setting_names import nearest

PREFIX = "/v1/"
SHOWN_MAX = 40
"""The most characters of an unknown name in an error message."""


async def reject_unknown_query(request: Request) -> None:
    """Raise Problem (400) if the request has a parameter that its route lacks. A dependency of every route.

    It is async, since FastAPI runs other dependencies in a thread.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.include_in_schema or not route.path.startswith(PREFIX):
        return
    if not request.scope["query_string"]:
        return
    known = sorted(set(_names(route.dependant)))
    for name in request.query_params:
        if name not in known:
            raise Problem(
                ErrorKind(BAD_REQUEST, "UNKNOWN_PARAMETER", "Wrong request"), _describe(name[:SHOWN_MAX], known)
            )


def _describe(name: str, known: list[str]) -> str:
    """Return the error message for an unknown parameter.

    >>> _describe("atomc", ["ack", "atomic"])
    "query: no parameter 'atomc' here (did you mean atomic?)"
    >>> _describe("zzz", ["ack", "atomic"]), _describe("a", [])
    ("query: no parameter 'zzz' here; there are ack, atomic", "query: no parameter 'a' here; there are none")
    """
    return f"query: no parameter {name!r} here" + (nearest(name, known) or f"; there are {', '.join(known) or 'none'}")


def _names(dependant: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and its dependencies."""
    yield from (field.alias for field in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _names(dependency)

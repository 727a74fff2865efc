"""Query parameters under `/v1` that a route does not have are refused, with the nearest that it has.

A misspelled `?atomic=true` would otherwise store events one by one. REST Proxy's and Kafka Connect's routes ignore what
they do not know, as their originals do. A route that is handed on to another service is not described, and the other
service checks it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from api.problem import ErrorKind, Problem
from shared.common.setting_names import nearest

PREFIX = "/v1/"
SHOWN_MAX = 40
"""Characters of a name that are repeated in an error."""


async def refuse_unknown_query(request: Request) -> None:
    """A dependency of every route: Problem (400) where the request has a parameter that its route does not have.

    It is async: FastAPI runs others in a thread.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.include_in_schema or not route.path.startswith(PREFIX):
        return
    if not request.scope["query_string"]:
        return
    known = sorted(set(_names(route.dependant)))
    for name in request.query_params:
        if name not in known:
            raise Problem(ErrorKind(400, "UNKNOWN_PARAMETER", "Wrong request"), _said(name[:SHOWN_MAX], known))


def _said(name: str, known: list[str]) -> str:
    """What is wrong.

    >>> _said("atomc", ["ack", "atomic"])
    "query: no parameter 'atomc' here (did you mean atomic?)"
    >>> _said("zzz", ["ack", "atomic"]), _said("a", [])
    ("query: no parameter 'zzz' here; there are ack, atomic", "query: no parameter 'a' here; there are none")
    """
    return f"query: no parameter {name!r} here" + (nearest(name, known) or f"; there are {', '.join(known) or 'none'}")


def _names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for one in dependant.dependencies:
        yield from _names(one)

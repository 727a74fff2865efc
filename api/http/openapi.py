"""The OpenAPI document: FastAPI's document of the routes, completed.

Each route describes its answer by a type with examples. Added here are the error format of each path in place of
FastAPI's 422, and the forwarded routes of other services, as those services describe them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from penstock.api.http.problem import JSON_TYPE, PROBLEM_TYPE, ProblemDetails, RestError, is_rest_proxy

Document = Mapping[str, Any]
_REFERENCE = re.compile(r"#/components/schemas/([\w.-]+)")
_OF_VALIDATION = ("HTTPValidationError", "ValidationError")
_METHODS = ("get", "put", "post", "patch", "delete")


def describe(app: FastAPI, handed_on: Callable[[], Iterable[Document]] = tuple) -> None:
    """Make the app answer `/openapi.json` with the completed document.

    `handed_on` returns the documents of forwarded routes. It is called for the first request.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for other in handed_on():
                add(document, other)
            complete(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def add(document: dict[str, Any], other: Document) -> None:
    """Add the paths and schemas of another document. A name may not stand for two schemas."""
    for path, operations in other["paths"].items():
        document["paths"].setdefault(path, {}).update(operations)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in other["components"]["schemas"].items():
        assert schemas.setdefault(name, schema) == schema, f"two schemas are named {name}"


def complete(document: dict[str, Any]) -> None:
    """Complete every operation in place."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _OF_VALIDATION:
        schemas.pop(name, None)
    for model in (ProblemDetails, RestError):
        schemas[model.__name__] = TypeAdapter(model).json_schema()
    for path, _, operation in operations_of(document):
        media_type, error = error_of(path)
        answers = operation["responses"]
        if "HTTPValidationError" in str(answers.get("422", "")):
            del answers["422"]  # a wrong parameter or body is a 400 here
        answers.setdefault("default", {"description": "rejected or failed"})
        for status, answer in answers.items():
            if not status.startswith("2"):
                content = {media_type: {"schema": {"$ref": f"#/components/schemas/{error.__name__}"}}}
                answer.setdefault("content", content)


def operations_of(document: Document) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and description of every operation."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS:
                yield path, method, operation


def handed_on_paths(document: Document, *prefixes: str) -> Document:
    """Return another service's paths under the prefixes, with the schemas that they refer to."""
    paths = {
        path: {
            method: {key: value for key, value in operation.items() if key != "operationId"}
            for method, operation in operations.items()
        }
        for path, operations in document["paths"].items()
        if path.startswith(prefixes)
    }
    known, open_names = document["components"]["schemas"], _references(paths)
    schemas: dict[str, Any] = {}
    while open_names:
        found = {name: known[name] for name in open_names}
        schemas |= found
        open_names = _references(found) - schemas.keys()
    return {"paths": paths, "components": {"schemas": schemas}}


def error_of(path: str) -> tuple[str, type]:
    """Return the error format of a path: the media type, and the type of the body."""
    return (JSON_TYPE, RestError) if is_rest_proxy(path) else (PROBLEM_TYPE, ProblemDetails)


def _references(schema: Any) -> set[str]:
    return set(_REFERENCE.findall(str(schema)))

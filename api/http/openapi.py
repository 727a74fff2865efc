"""The OpenAPI document: FastAPI's document of the routes, completed.

Each route describes its response by a type with examples. This module adds the error format of each path, which
replaces FastAPI's 422, and the forwarded routes of other services, as those services describe them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from penstock.api.http.problem import ProblemDetails, RestError, error_format_of

Document = Mapping[str, Any]
_REFERENCE = re.compile(r"#/components/schemas/([\w.-]+)")
_VALIDATION_SCHEMAS = ("HTTPValidationError", "ValidationError")
_METHODS = ("get", "put", "post", "patch", "delete")


def serve_openapi_document(app: FastAPI, forwarded_documents: Callable[[], Iterable[Document]] = tuple) -> None:
    """Make the app serve its OpenAPI document at `/openapi.json`.

    The document is FastAPI's, with the error format of each path and the forwarded routes added. `forwarded_documents`
    returns the documents of the forwarded routes. Only the first request for `/openapi.json` calls it.
    """

    def openapi_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for other in forwarded_documents():
                add_document(document, other)
            complete_operations(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi_document  # type: ignore[method-assign]


def add_document(document: dict[str, Any], other: Document) -> None:
    """Add the paths and schemas of another document. Schemas of the same name must be equal."""
    for path, operations in other["paths"].items():
        document["paths"].setdefault(path, {}).update(operations)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in other["components"]["schemas"].items():
        assert schemas.setdefault(name, schema) == schema, f"two schemas are named {name}"


def complete_operations(document: dict[str, Any]) -> None:
    """Add the error format of its path to every operation, and remove FastAPI's 422. Modifies the document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _VALIDATION_SCHEMAS:
        schemas.pop(name, None)
    for model in (ProblemDetails, RestError):
        schemas[model.__name__] = TypeAdapter(model).json_schema()
    for path, _, operation in operations_of(document):
        media_type, error = error_format_of(path)
        responses = operation["responses"]
        if "HTTPValidationError" in str(responses.get("422", "")):
            # The response to an invalid parameter or body is 400 instead.
            del responses["422"]
        responses.setdefault("default", {"description": "rejected or failed"})
        for status, response in responses.items():
            if not status.startswith("2"):
                content = {media_type: {"schema": {"$ref": f"#/components/schemas/{error.__name__}"}}}
                response.setdefault("content", content)


def operations_of(document: Document) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and description of every operation."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS:
                yield path, method, operation


def forwarded_paths(document: Document, *prefixes: str) -> Document:
    """Return another service's paths under the prefixes, with the schemas that they refer to."""
    paths = {
        path: {
            method: {key: value for key, value in operation.items() if key != "operationId"}
            for method, operation in operations.items()
        }
        for path, operations in document["paths"].items()
        if path.startswith(prefixes)
    }
    all_schemas = document["components"]["schemas"]
    schemas: dict[str, Any] = {}
    missing = _referenced_schemas(paths)
    while missing:
        added = {name: all_schemas[name] for name in missing}
        schemas |= added
        missing = _referenced_schemas(added) - schemas.keys()
    return {"paths": paths, "components": {"schemas": schemas}}


def _referenced_schemas(schema: Any) -> set[str]:
    """Return the names of the schemas that a value refers to."""
    return set(_REFERENCE.findall(str(schema)))

"""The OpenAPI document: FastAPI's document of the routes, completed.

Added are an example of every parameter, body and answer (`openapi_examples`), this service's error format in place of
FastAPI's 422, and the forwarded routes of other services, as those services describe them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from penstock.api.http.openapi_examples import ANSWERS, BODIES, CONNECT_ERROR, PARAMETERS, PROBLEM, REST_ERROR
from penstock.api.http.problem import JSON_TYPE, PROBLEM_TYPE, is_rest_proxy

Paths = Mapping[str, Mapping[str, Any]]
_NAMED = re.compile(r"\{(\w+)(?::path)?\}")
_OF_VALIDATION = ("HTTPValidationError", "ValidationError")
_METHODS = ("get", "put", "post", "patch", "delete")


def describe(app: FastAPI, handed_on: Callable[[], Paths] = dict) -> None:
    """Make the app answer `/openapi.json` with the completed document. `handed_on` is called for the first request."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, operations in handed_on().items():
                document["paths"].setdefault(path, {}).update(operations)
            complete(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def complete(document: dict[str, Any]) -> None:
    """Complete every operation in place."""
    for path, method, operation in operations_of(document):
        _parameters(path, operation)
        _body(path, method, operation)
        _answers(path, method, operation)
    for name in _OF_VALIDATION:
        document.get("components", {}).get("schemas", {}).pop(name, None)


def operations_of(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and description of every operation."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS:
                yield path, method, operation


def handed_on_paths(document: Mapping[str, Any], *prefixes: str) -> dict[str, Any]:
    """Return another service's paths under the prefixes, without references to the rest of its document."""
    found = {}
    for path, operations in document["paths"].items():
        if path.startswith(prefixes):
            found[path] = {
                method: {key: value for key, value in operation.items() if key != "operationId"}
                for method, operation in operations.items()
            }
    return found


def _parameters(path: str, operation: dict[str, Any]) -> None:
    parameters = operation.setdefault("parameters", [])
    known = {parameter["name"] for parameter in parameters}
    for name in _NAMED.findall(path):
        if name not in known:
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    for parameter in parameters:
        if parameter["name"] in PARAMETERS:
            parameter.setdefault("example", PARAMETERS[parameter["name"]])


def _body(path: str, method: str, operation: dict[str, Any]) -> None:
    example = BODIES.get((method, path))
    if example is None:
        return
    body = operation.setdefault("requestBody", {"required": True, "content": {}})
    content = body["content"].setdefault(JSON_TYPE, {"schema": {"type": "object"}})
    content.setdefault("example", example)


def _answers(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    if "HTTPValidationError" in str(answers.get("422", "")):
        del answers["422"]  # a wrong parameter or body is a 400 here
    media_type, example = error_of(path)
    answers.setdefault("default", {"description": "rejected or failed"})
    for status, answer in answers.items():
        if status.startswith("2"):
            found = ANSWERS.get((method, path))
            for content in answer.get("content", {}).values() if found is not None else ():
                content.setdefault("example", found)
        else:
            content = answer.setdefault("content", {media_type: {}}).setdefault(media_type, {})
            content.setdefault("example", example | _status(example, status))


def error_of(path: str) -> tuple[str, dict[str, Any]]:
    """Return the error format of a path: the media type, and an example."""
    if not is_rest_proxy(path):
        return PROBLEM_TYPE, PROBLEM
    return JSON_TYPE, CONNECT_ERROR if path.startswith("/connect") else REST_ERROR


def _status(example: Mapping[str, Any], status: str) -> dict[str, Any]:
    return {"status": int(status)} if "status" in example and status.isdigit() else {}

"""A schema registry for tests: subjects, versions and ids over REST, on a real socket.

It stores registered schemas, rejects invalid schemas and unauthorized requests, and fails when a test requests it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import fastavro

from penstock.shared.connect.converters.avro_schemas import for_fastavro
from tests.shared.connect.connectors.http_server import Request, Response, Server, serving

TYPE = "application/vnd.schemaregistry.v1+json"


@dataclass
class SchemaRegistry:
    """The registry's state, and the requests that it received."""

    user: str = ""
    server: Server = field(default_factory=lambda: Server(""))
    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    failing: list[Response] = field(default_factory=list)
    """Responses that it returns first, before it answers normally."""

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def requested(self) -> list[str]:
        return [f"{request.method} {request.path}" for request in self.server.requests]

    def add(self, subject: str, schema: Any, kind: str = "AVRO", references: list[dict[str, Any]] | None = None) -> int:
        """Register a schema, as another client would."""
        body = {"schema": json.dumps(schema), "schemaType": kind, "references": references or []}
        found = self._register(subject, body)
        assert found[0] == 200, found
        return int(json.loads(found[2])["id"])

    def respond(self, request: Request) -> Response:
        if self.failing:
            return self.failing.pop(0)
        wanted = "Basic " + base64.b64encode(self.user.encode()).decode()
        if self.user and request.headers.get("authorization") != wanted:
            return _response(401, {"error_code": 401, "message": "Unauthorized"})
        path, _, _query = request.path.partition("?")
        match (request.method, *map(unquote, path.strip("/").split("/"))):
            case ("GET", "schemas", "ids", id):
                found = self.schemas.get(int(id))
                return _response(200, _shown(found)) if found else _error(404, 40403, "Schema not found")
            case ("POST", "subjects", subject, "versions"):
                return self._register(subject, json.loads(request.body))
            case ("POST", "subjects", subject):
                return self._lookup(subject, json.loads(request.body))
            case ("GET", "subjects", subject, "versions", version):
                return self._version(subject, version)
        return _error(404, 404, "HTTP 404 Not Found")

    def _register(self, subject: str, body: dict[str, Any]) -> Response:
        new = {"schemaType": "AVRO", "references": [], **body}
        if new["schemaType"] == "AVRO" and not self._is_avro(new):
            return _error(422, 42201, "Invalid schema")
        id = next((id for id, known in self.schemas.items() if known == new), len(self.schemas) + 1)
        self.schemas[id] = new
        versions = self.subjects.setdefault(subject, [])
        if id not in versions:
            versions.append(id)
        return _response(200, {"id": id})

    def _is_avro(self, new: dict[str, Any]) -> bool:
        named: dict[str, Any] = {}
        # Like Confluent's registry, this one accepts a default of another type, and a decimal whose scale is above its
        # precision.
        try:
            for reference in new["references"]:
                id = self.subjects[reference["subject"]][reference["version"] - 1]
                referenced = for_fastavro(json.loads(self.schemas[id]["schema"]))
                fastavro.parse_schema(referenced, named, _ignore_default_error=True)
            fastavro.parse_schema(for_fastavro(json.loads(new["schema"])), named, _ignore_default_error=True)
        except Exception:  # any error makes it invalid
            return False
        return True

    def _lookup(self, subject: str, body: dict[str, Any]) -> Response:
        if subject not in self.subjects:
            return _error(404, 40401, f"Subject '{subject}' not found.")
        new = {"schemaType": "AVRO", "references": [], **body}
        for id in self.subjects[subject]:
            if self.schemas[id] == new:
                return _response(200, {"subject": subject, "id": id, **_shown(new)})
        return _error(404, 40403, "Schema not found")

    def _version(self, subject: str, version: str) -> Response:
        if subject not in self.subjects:
            return _error(404, 40401, f"Subject '{subject}' not found.")
        ids = self.subjects[subject]
        number = len(ids) if version == "latest" else int(version)
        if not 0 < number <= len(ids):
            return _error(404, 40402, f"Version {version} not found.")
        id = ids[number - 1]
        return _response(200, {"subject": subject, "version": number, "id": id, **_shown(self.schemas[id])})


def _shown(schema: dict[str, Any]) -> dict[str, Any]:
    shown = {"schema": schema["schema"]}
    if schema["schemaType"] != "AVRO":
        shown["schemaType"] = schema["schemaType"]
    return {**shown, "references": schema["references"]} if schema["references"] else shown


def _error(status: int, code: int, message: str) -> Response:
    return _response(status, {"error_code": code, "message": message})


def _response(status: int, body: Any) -> Response:
    return status, {"Content-Type": TYPE}, json.dumps(body).encode()


@asynccontextmanager
async def schema_registry(user: str = "") -> AsyncIterator[SchemaRegistry]:
    """Run a registry on a free port; `user` is the required user:password."""
    registry = SchemaRegistry(user)
    async with serving(lambda request: registry.respond(request)) as server:
        registry.server = server
        yield registry

"""The OpenAPI document: it is complete, its examples are valid, and responses match it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from penstock.api.admin.dead_letters import dead_letters_router
from penstock.api.admin.routes import admin_router
from penstock.api.console.dashboard import dashboard_router
from penstock.api.console.history import Point, point
from penstock.api.console.overview import KafkaSample, Overview, OverviewBuilder, ServiceSample
from penstock.api.http.app import create_app
from penstock.api.http.health import health_router
from penstock.api.http.openapi import operations_of
from penstock.api.ingest.routes import Ingest
from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.api.rest_proxy.routes import metadata_routers, produce_routers
from penstock.api.settings import IngestSettings
from penstock.api.streams.routes import streams_router
from penstock.api.streams.task_views import CompactionState, StreamsState
from penstock.services.admin.routers import forwarded_documents
from penstock.shared.clients.admin import MemberDescription
from tests.api.admin.test_administration import F0, MemoryAdmin, MemoryDeadLetters
from tests.api.conftest import MemoryProducer
from tests.api.streams.test_queries import STATE, View

NAMES = {"topic": "flights", "cluster_id": "c-1", "group": "banks", "consumer": "m-1", "partition": 0, "number": 0}
NAMES |= {"broker_id": 1, "config": "cleanup.policy"}


class Provider:
    """Provides an overview of one service with a running and a missing task, and of one group."""

    async def overview(self) -> Overview:
        kafka = KafkaSample("c-1", 1, [{"group": "banks", "state": "Stable", "members": 1, "lag": 6}])
        compaction: CompactionState = {"started_at_ms": 1, "seconds": 1.5, "status": "done", "rows": 3}
        streams: StreamsState = {**STATE, "compactions": [compaction], "missing": [{"partition": 1, "reason": "gone"}]}
        sample = ServiceSample("aggregator", "", "ok", streams=streams)
        overview = OverviewBuilder().build([sample], kafka, now_ms=1, monotonic_ms=1)
        assert [task["state"] for task in overview["streams"]["tasks"]] == ["running", "missing"]
        assert overview["compactions"] == [compaction]
        return overview

    def history(self) -> list[Point]:
        return [point({"now_ms": 1})]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """An app with every route of a gateway, over implementations in memory."""
    producer, settings, admin = MemoryProducer(("flights",)), IngestSettings(), MemoryAdmin()
    admin.members = [MemberDescription("m-1", "client", "/host", None, frozenset({F0}))]
    ingest = Ingest(producer, settings, CollectorRegistry())
    rest = [*produce_routers(RestProducer(ingest, producer, settings), admin), *metadata_routers(admin)]
    return create_app(
        ingest=ingest.router,
        rest_proxy=rest,
        admin=admin_router(admin),
        streams=streams_router(View()),
        more=[dead_letters_router(MemoryDeadLetters())],
        dashboard=dashboard_router(Provider()),
        health=health_router("gateway", {}, CollectorRegistry()),
        forwarded_documents=forwarded_documents,
    )


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    """The app's document, which no test changes."""
    return app.openapi()


WITHOUT_BODY = frozenset({"204", "202"})
"""Statuses that may have no body."""
WITHOUT_REQUEST_BODY = ("/pause", "/resume", "/stop", "/reset")


def test_every_operation_has_complete_schemas(document: dict[str, Any]) -> None:
    """Each parameter, body, response and error has a schema from which an example can be built,
    also of forwarded services.
    """
    seen = {(method, path) for path, method, _ in operations_of(document)}
    assert {("post", "/connectors"), ("get", "/v1/streams/stores/{store}"), ("post", "/v1/compactions")} <= seen
    for path, method, operation in operations_of(document):
        where = f"{method} {path}"
        for parameter in operation.get("parameters", []):
            example(parameter["schema"], document, f"{where}: {parameter['name']}")
        contents = operation.get("requestBody", {"content": {}})["content"]
        assert method not in ("put", "patch") or contents or path.endswith(WITHOUT_REQUEST_BODY), where
        for content in contents.values():
            example(content["schema"], document, where)
        assert "default" in operation["responses"], where
        for status, response in operation["responses"].items():
            assert response.get("content") or status in WITHOUT_BODY, f"{where}: {status}"
            for content in response.get("content", {}).values():
                if content:
                    example(content["schema"], document, f"{where}: {status}")
    assert "HTTPValidationError" not in str(document)


def test_each_example_is_valid_against_its_own_schema(document: dict[str, Any]) -> None:
    """Each example is valid against its own schema."""
    found = list(schemas_with_examples(document))
    assert len(found) > 200
    for schema in found:
        for given in schema["examples"]:
            assert list(errors_of(given, schema, document)) == []


def test_totals_of_the_overview_are_integers(document: dict[str, Any]) -> None:
    """A total is no rate: its type is integer, and its example a count."""
    schemas = document["components"]["schemas"]
    totals = {
        "IngestState": ("stored", "rejected", "rejected_requests"),
        "StreamsOverview": ("state_rows", "closed_windows", "late_records"),
        "Overview": ("dead_letters",),
    }
    for name, fields in totals.items():
        for field in fields:
            types = [one["type"] for one in schemas[name]["properties"][field]["anyOf"]]
            assert types == ["integer", "null"], (name, field)


async def test_responses_match_their_schemas(app: FastAPI, document: dict[str, Any]) -> None:
    """No response has an undescribed member or a value of another type."""
    document, requests = closed(document), 0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path, method, operation in operations_of(document):
            if method != "get" or path.startswith(("/connect", "/metrics", "/v1/streams/stores/")):
                continue
            response = await client.get(path.format(**NAMES))
            assert response.status_code == 200, path
            ((media_type, content),) = operation["responses"]["200"]["content"].items()
            assert response.headers["content-type"] == media_type, path
            assert list(errors_of(response.json(), content["schema"], document)) == [], path
            requests += 1
    assert requests > 25


def example(schema: dict[str, Any], document: dict[str, Any], where: str) -> Any:
    """Build an example of a schema from the examples in it; fail if a part has none."""
    if "$ref" in schema:
        return example(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document, where)
    for name in ("examples", "enum"):
        if name in schema:
            return schema[name][0]
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if "anyOf" in schema:
        is_optional = {"type": "null"} in schema["anyOf"]
        return None if is_optional else example(schema["anyOf"][0], document, where)
    match schema.get("type"):
        case "object" if "properties" in schema:
            properties = schema["properties"].items()
            return {name: example(one, document, f"{where}.{name}") for name, one in properties}
        case "array":
            return [example(schema["items"], document, f"{where}[]")]
        case "boolean":
            return True
        case "null":
            return None
    raise AssertionError(f"{where}: no example")


def errors_of(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    """The differences between a value and its schema."""
    for error in Draft202012Validator(schema | {"components": document["components"]}).iter_errors(value):
        yield f"{error.json_path}: {error.message}"


def schemas_with_examples(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema in the document that has examples."""
    if isinstance(value, dict):
        if isinstance(value.get("examples"), list):
            yield value
        for name, one in value.items():
            if name != "examples":
                yield from schemas_with_examples(one)
    elif isinstance(value, list):
        for one in value:
            yield from schemas_with_examples(one)


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of the document whose objects allow no undescribed members."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document

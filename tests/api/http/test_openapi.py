"""The OpenAPI document: whole, with examples, and true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from penstock.api.admin.dead_letters import dead_letters_router
from penstock.api.admin.routes import admin_router
from penstock.api.http.app import create_app
from penstock.api.http.health import health_router
from penstock.api.http.openapi import operations_of
from penstock.api.http.openapi_examples import ANSWERS, BODIES
from penstock.api.ingest.routes import Ingest
from penstock.api.rest_proxy.produce import RestProducer
from penstock.api.rest_proxy.routes import metadata_routers, produce_routers
from penstock.api.settings import IngestSettings
from penstock.api.streams.routes import streams_router
from penstock.services.admin.routers import handed_on
from penstock.shared.clients.admin import MemberDescription
from tests.api.admin.test_dead_letters import MemoryLetters
from tests.api.admin.test_routes import F0, MemoryAdmin
from tests.api.conftest import MemoryProducer
from tests.api.streams.test_routes import View

OPEN = frozenset({"configs", "checks", "rows", "config"})
"""Objects whose names are anybody's."""
NAMES = {"topic": "flights", "cluster_id": "c-1", "group": "banks", "consumer": "m-1", "partition": 0, "number": 0}
NAMES |= {"broker_id": 1, "config": "cleanup.policy"}


@pytest.fixture
def app() -> FastAPI:
    """Every route of a gateway over memory, streams included."""
    producer, settings, admin = MemoryProducer(("flights",)), IngestSettings(), MemoryAdmin()
    admin.members = [MemberDescription("m-1", "client", "/host", None, frozenset({F0}))]
    ingest = Ingest(producer, settings, CollectorRegistry())
    rest = [*produce_routers(RestProducer(ingest, producer, settings), admin), *metadata_routers(admin)]
    return create_app(
        ingest=ingest.router,
        rest_proxy=rest,
        admin=admin_router(admin),
        streams=streams_router(View()),
        more=[dead_letters_router(MemoryLetters())],
        health=health_router("gateway", {}, CollectorRegistry()),
        handed_on=handed_on,
    )


def test_every_operation_has_its_examples(app: FastAPI) -> None:
    """Each parameter, each body, each answer that says something, and how it says no; another service's too."""
    document = app.openapi()
    seen = {(method, path) for path, method, _ in operations_of(document)}
    assert {("post", "/connectors"), ("get", "/v1/streams/stores/{store}"), ("post", "/v1/compactions")} <= seen
    for path, method, operation in operations_of(document):
        where = f"{method} {path}"
        assert all("example" in parameter for parameter in operation["parameters"]), where
        contents = operation.get("requestBody", {"content": {}})["content"]
        assert all("example" in content for content in contents.values()), where
        assert method not in ("post", "put", "patch") or contents or BODIES.get((method, path)) is None, where
        for status, answer in operation["responses"].items():
            if status in ("200", "201", "default") and not (status == "200" and method == "post" and not contents):
                assert any("example" in content for content in answer["content"].values()), f"{where} {status}"
    assert "422" not in {s for p, _, o in operations_of(document) for s in o["responses"] if not p.endswith("/events")}
    assert "HTTPValidationError" not in str(document)


def test_no_example_is_of_a_route_that_is_not_there(app: FastAPI) -> None:
    """A route that is renamed takes its example along."""
    seen = {(method, path) for path, method, _ in operations_of(app.openapi())}
    assert {*ANSWERS, *BODIES} - seen <= {("get", "/v1/overview"), ("get", "/v1/history")}


async def test_the_examples_say_what_the_routes_say(app: FastAPI) -> None:
    """No answer has a member that its example lacks, nor a value of another type."""
    asked = 0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path, method, operation in operations_of(app.openapi()):
            if method != "get" or path.startswith(("/connect", "/metrics", "/v1/streams/stores/")):
                continue
            answer = await client.get(path.format(**NAMES))
            assert answer.status_code == 200, path
            (content,) = operation["responses"]["200"]["content"].values()
            differs = list(difference(answer.json(), content["example"], path))
            assert not differs, differs
            asked += 1
    assert asked > 25


def difference(answer: Any, example: Any, where: str) -> list[str]:
    """Where an answer has what its example does not show."""
    if answer is None or example is None:
        return []
    if isinstance(answer, Mapping) and isinstance(example, Mapping):
        if where.rpartition(".")[2] in OPEN:
            return []
        found = [f"{where}.{name} is in no example" for name in answer.keys() - example.keys()]
        for name in answer.keys() & example.keys():
            found += difference(answer[name], example[name], f"{where}.{name}")
        return found
    if isinstance(answer, list) and isinstance(example, list):
        return [one for row in answer[:1] for one in difference(row, example[0], f"{where}[]")] if example else []
    return [] if type(answer) is type(example) else [f"{where}: {answer!r} is not as {example!r}"]

"""Requests to Kafka Connect's REST API: bodies, paths, a new connector's location, and the schemas of responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import httpx
import pytest
from fastapi import Request
from starlette.exceptions import HTTPException

from penstock.api.connect.request_parsing import (
    json_body,
    json_list,
    normalize_path,
    patch_of,
    settings_body,
    task_number,
)
from penstock.api.connect.routes import create_connect_app
from penstock.api.http.openapi import operations_of
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import properties_from_json
from penstock.shared.connect.runtime.create_request import config_of
from tests.api.http.test_openapi import closed, errors_of
from tests.documents import DOCS
from tests.shared.connect.recordings import recorded_requests


def test_values_become_strings() -> None:
    """Integers and booleans become strings as in JSON, and nulls are left out."""
    assert properties_from_json({"a": 1, "b": "2.5", "c": False, "d": "x", "e": None}, "config") == {
        "a": "1",
        "b": "2.5",
        "c": "false",
        "d": "x",
    }
    assert config_of({"name": "n"}, "n") == {"name": "n"}


def test_a_patch_removes_settings() -> None:
    """A null removes a setting; another name is a BadRequest."""
    assert patch_of({"a": 1, "b": None}, "n") == {"a": "1", "b": None}
    with pytest.raises(BadRequest):
        patch_of({"name": "m"}, "n")
    with pytest.raises(BadRequest):
        patch_of([], "n")


def test_task_configs_are_an_array() -> None:
    """Task configs must be a JSON array that is not nested too deeply. Their numbers keep their characters."""
    assert json_list(b'[{"a": 1.50}]') == [{"a": "1.50"}]
    for body in (b"{}", b"", b"\xff", b"[" * 100_000):
        with pytest.raises(BadRequest):
            json_list(body)


def _request(content_type: str, body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    headers = [(b"content-type", content_type.encode())] if content_type else []
    return Request({"type": "http", "method": "POST", "path": "/connectors", "headers": headers}, receive)


@pytest.mark.parametrize("content_type", ["", "application/json", "Application/JSON; charset=utf-8"])
async def test_a_body_is_json(content_type: str) -> None:
    """A body is JSON with the content type of JSON, and without one."""
    assert await json_body(_request(content_type, b'{"a":1}')) == {"a": 1}


async def test_numbers_of_settings_are_not_rewritten() -> None:
    """A number with a point or an exponent keeps its characters, whatever its size and precision."""
    numbers = {"a": "1.50", "b": "1e5", "c": "1.0E-7", "d": "0.1000000000000000055511151231257827", "e": "-1e400"}
    body = ",".join(f'"{name}":{number}' for name, number in numbers.items())
    assert config_of(await settings_body(_request("", f"{{{body}}}".encode())), "n") == numbers | {"name": "n"}


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=x", "application/xml"])
async def test_another_content_type_is_a_415(content_type: str) -> None:
    """A body with another content type is a 415; an empty body is a BadRequest."""
    with pytest.raises(HTTPException) as raised:
        await json_body(_request(content_type, b'{"a":1}'))
    assert raised.value.status_code == 415
    with pytest.raises(BadRequest):
        await json_body(_request(content_type, b" "))


async def test_a_number_of_no_task_is_a_404() -> None:
    """Text in place of a task's number, and a number of any length that no task can have, are a 404."""
    assert await task_number("12") == 12
    for text in ("-1", "one", "9" * 5_000):
        with pytest.raises(HTTPException) as raised:
            await task_number(text)
        assert raised.value.status_code == 404


def test_paths_lose_trailing_slashes_and_keep_those_in_names() -> None:
    """Trailing slashes are removed, and %2F does not separate path segments."""
    assert normalize_path(b"/", "/") == "/"
    assert normalize_path(b"/connectors//", "/connectors//") == "/connectors"
    assert normalize_path(b"/connectors/a%2fb", "/connectors/a/b") == "/connectors/a\x00b"


class CreatingHerder:
    """A herder that creates every connector."""

    is_ready = True

    async def put_connector(
        self, name: str, config: Mapping[str, str], target: object = None, *, replace: bool
    ) -> tuple[bool, dict[str, Any]]:
        return True, {"name": name, "config": dict(config), "tasks": [], "type": "source"}


@pytest.mark.parametrize(
    ("name", "written"), [("orders", "orders"), ("Aufträge €", "Auftr%C3%A4ge%20%E2%82%AC"), ("a/b", "a%2Fb")]
)
async def test_a_new_connectors_location_can_be_followed(name: str, written: str) -> None:
    """The Location header of a new connector is percent-encoded, also for names with slashes
    or non-ASCII characters.
    """
    transport = httpx.ASGITransport(create_connect_app(cast(Any, CreatingHerder())), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://me:8083") as client:
        for response in (
            await client.post("/connectors", json={"name": name, "config": {"connector.class": "X"}}),
            await client.put(f"/connectors/{written}/config", json={"connector.class": "X"}),
        ):
            assert (response.status_code, response.json()["name"]) == (201, name)
            assert response.headers["location"] == f"http://me:8083/connectors/{written}"


def test_kafka_connects_responses_match_the_schemas() -> None:
    """Every response that was recorded from Kafka Connect has a described status, and no undescribed member. No error
    is a problem of RFC 9457."""
    document = create_connect_app(cast(Any, None)).openapi()
    assert "ProblemDetails" not in str(document["paths"])
    document = closed(document)
    operations = {
        (method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path) + "/*")): operation["responses"]
        for path, method, operation in operations_of(document)
    }
    undescribed, seen = [], 0
    for line in (line for line in recorded_requests() if "method" in line):
        method, path, status = line["method"], line["path"].partition("?")[0], line["status"]
        responses = [found for (verb, paths), found in operations.items() if verb == method and paths.fullmatch(path)]
        if not responses:
            undescribed.append((method, path, status))
            continue
        response = responses[0]["default"] if status >= 400 else responses[0][str(status)]
        schemas = [content["schema"] for content in response.get("content", {}).values()]
        if schemas:
            assert list(errors_of(line["response"], schemas[0], document)) == [], (method, path)
        else:
            assert line["response"] is None, (method, path)
        seen += 1
    assert undescribed == [("GET", "/nowhere", 404), ("PUT", "/connectors", 405)]
    assert seen > 90


def test_the_query_parameters_of_the_documentation_are_described() -> None:
    """The OpenAPI document has the query parameters of each route in connect-rest.md, and no others."""
    text = (DOCS / "connect-rest.md").read_text(encoding="utf-8")
    written = re.findall(r"(/[\w/{}-]+)(\?\S+)`", text)
    documented = {path: set(re.findall(r"[?&](\w+)=", query)) for path, query in written}
    described: dict[str, set[str]] = {}
    for path, _, operation in operations_of(create_connect_app(cast(Any, None)).openapi()):
        if names := {found["name"] for found in operation.get("parameters", []) if found["in"] == "query"}:
            described[path] = names
    assert described == documented

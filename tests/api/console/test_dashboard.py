"""The dashboard's page and its data."""

from __future__ import annotations

import re
from typing import Any

import httpx

from penstock.api.console.dashboard import content_security_policy, dashboard_router
from penstock.api.console.overview import KafkaSample, OverviewBuilder
from penstock.api.http.app import create_app


class Provider:
    """Provides an empty overview."""

    async def overview(self) -> dict[str, Any]:
        return OverviewBuilder().build([], KafkaSample(error="no broker"), now_ms=1, monotonic_ms=0)

    def history(self) -> list[dict[str, Any]]:
        return [{"at_ms": 1}]


async def get(path: str) -> httpx.Response:
    app = create_app(dashboard=dashboard_router(Provider()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.get(path)


async def test_the_page_is_self_contained() -> None:
    """The page loads no external asset, builds no markup from data, and its policy allows only
    its own script and style.
    """
    response = await get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = response.text
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b| style=| on\w+=", page)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy == content_security_policy(response.content)
    assert len(re.findall("'sha256-", policy)) == 2


async def test_the_overview_is_json() -> None:
    """The overview is the provider's, as JSON."""
    response = await get("/v1/overview")
    assert response.status_code == 200
    assert response.json()["kafka"] == {"cluster_id": None, "brokers": None, "error": "no broker"}


async def test_every_value_the_page_reads_is_in_the_overview() -> None:
    """Every member that the script reads is in the overview."""
    page = (await get("/")).text
    overview = (await get("/v1/overview")).json()
    paths = set(re.findall(r"\bo\.([a-z0-9_.]+?)(?=[^a-z0-9_.])", page))
    assert len(paths) > 5
    for path in paths:
        value: Any = overview
        for name in path.split("."):
            assert name in value, path
            value = value[name]


async def test_every_element_the_script_uses_exists() -> None:
    """Each element id that the script uses is on the page once."""
    page = (await get("/")).text
    ids = set(re.findall(r"(?:byId|set|table)\(\"([a-z0-9-]+)\"", page))
    assert len(ids) > 5
    for used in ids:
        assert page.count(f'id="{used}"') == 1, used

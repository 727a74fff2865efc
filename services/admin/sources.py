"""Where an overview's samples come from: services over HTTP, parts of this process, and Kafka (an edge)."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from penstock.api.admin.routes import AdminClient
from penstock.api.console.samples import KafkaSample, ServiceSample
from penstock.api.http.health import Check, CheckResult, health_body, run_checks
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.reverse_proxy import Answer
from penstock.api.streams.routes import StreamsView
from penstock.shared.common import metrics
from penstock.shared.common.errors import GroupNotFound, PenstockError

GROUPS_MAX = 50
"""Groups that the overview asks for, those with members first: each costs Kafka four requests."""
GONE = "Dead"
WITHOUT_MEMBERS = ("Empty", GONE)

KAFKA_TIMEOUT_MS = 3_000
LATENCY = "penstock_ingest_request_seconds_bucket"
WELL = ("ok", "healthy")
"""What `/health` says where all is well: of our services, and of Kafka Connect."""
FORWARD_SECONDS = 30
"""How long another service may take for a request that is handed on to it."""


def services_client(timeout_ms: int, token: SecretStr | None) -> httpx.AsyncClient:
    """The client for `HttpSource`, with the token that the services ask for."""
    headers = {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}
    return httpx.AsyncClient(timeout=timeout_ms / 1000, headers=headers, trust_env=False)


class Source(Protocol):
    """One service to be shown."""

    async def sample(self) -> ServiceSample:
        """What the service says now; never raises for what the service does."""
        ...


class HttpSource:
    """A service in another process, by its `/health`, `/metrics` and, where it has them, `/v1/streams`."""

    def __init__(self, name: str, url: str, client: httpx.AsyncClient) -> None:
        self.name = name
        self._url = url
        self._client = client

    def __repr__(self) -> str:
        return f"HttpSource({self.name}, {self._url})"

    async def check(self) -> CheckResult:
        """The service's own `/health` as one check."""
        try:
            body = (await self._client.get(f"{self._url}/health")).json()
            return CheckResult(body["status"] in WELL, failing(checks_of(body)))
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as e:
            return CheckResult(False, f"{self._url} does not tell: {type(e).__name__}: {e}".rstrip(": "))

    async def sample(self) -> ServiceSample:
        try:
            health = await self._client.get(f"{self._url}/health")
            body = health.json()
            checks = checks_of(body)
            status = "ok" if body["status"] in WELL else str(body["status"])
            totals = sum_metrics((await self._client.get(f"{self._url}/metrics")).text)
            streams = await self._client.get(f"{self._url}/v1/streams")
            state = streams.json() if streams.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, json.JSONDecodeError, KeyError, TypeError, ValueError) as e:
            return ServiceSample(self.name, self._url, "unreachable", f"{type(e).__name__}: {e}".rstrip(": "))
        return ServiceSample(self.name, self._url, status, failing(checks), checks, totals, state)


class HttpUpstream:
    """A service in another process, to which requests are handed on; see `penstock.api.http.reverse_proxy.Upstream`."""

    def __init__(self, name: str, url: str, client: httpx.AsyncClient) -> None:
        self.name = name
        self._url = url
        self._client = client

    async def ask(self, method: str, path: str, query: str, body: bytes, media_type: str) -> Answer:
        """Its answer; Problem (502) where it does not give any."""
        headers = {"Content-Type": media_type} if media_type else {}
        url = f"{self._url}{path}?{query}" if query else f"{self._url}{path}"
        try:
            answer = await self._client.request(method, url, content=body, headers=headers, timeout=FORWARD_SECONDS)
        except httpx.HTTPError as e:
            kind = ErrorKind(502, "SERVICE_UNREACHABLE", "Another service does not answer", 5)
            raise Problem(kind, f"{self.name}: {type(e).__name__}: {e}".rstrip(": ")) from None
        kind, retry_after, location = (
            answer.headers.get(name, "") for name in ("content-type", "retry-after", "location")
        )
        return Answer(answer.status_code, kind, answer.content, retry_after, location.removeprefix(self._url))


class LocalSource:
    """A part of this process, asked without HTTP."""

    def __init__(
        self,
        name: str,
        checks: Mapping[str, Check],
        registry: CollectorRegistry | None = None,
        streams: StreamsView | None = None,
    ) -> None:
        self._name = name
        self._checks = checks
        self._registry = registry
        self._streams = streams

    def __repr__(self) -> str:
        return f"LocalSource({self._name})"

    async def sample(self) -> ServiceSample:
        health = health_body(self._name, await run_checks(self._checks))
        totals = {} if self._registry is None else sum_metrics(metrics.render(self._registry).decode())
        state = None if self._streams is None else await self._streams.describe()
        return ServiceSample(
            self._name, "", health["status"], failing(health["checks"]), health["checks"], totals, state
        )


class KafkaSource:
    """The cluster and its groups, through an admin client."""

    def __init__(self, admin: AdminClient, timeout_ms: int = KAFKA_TIMEOUT_MS) -> None:
        self._admin = admin
        self._timeout_ms = timeout_ms

    async def sample(self) -> KafkaSample:
        """What Kafka says now, or why it does not."""
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                cluster = await self._admin.cluster()
                listed = [g for g in await self._admin.list_groups() if g.protocol_type in ("consumer", "")]
                listed.sort(key=lambda g: (g.state in WITHOUT_MEMBERS, g.group_id))
                found = await asyncio.gather(*(self._group(g.group_id) for g in listed[:GROUPS_MAX]))
        except TimeoutError:
            return KafkaSample(error=f"no answer within {self._timeout_ms} ms")
        except PenstockError as e:
            return KafkaSample(error=str(e) or type(e).__name__)
        groups = [group for group in found if group is not None]
        return KafkaSample(cluster.cluster_id, len(cluster.brokers), groups, max(0, len(listed) - GROUPS_MAX))

    async def _group(self, group_id: str) -> Mapping[str, Any] | None:
        """The group, or None where it was deleted meanwhile."""
        try:
            found = await self._admin.describe_group(group_id)
            lag = sum(row.lag for row in await self._admin.group_lag(group_id))
        except GroupNotFound:
            return None
        if found.state == GONE:
            return None
        return {"group": group_id, "state": found.state, "members": len(found.members), "lag": lag}


def sum_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format to one value a sample name, summed over labels."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == LATENCY:
                totals[f"{LATENCY}|{float(sample.labels['le'])}"] += sample.value
            elif sample.name.startswith("penstock_") and not sample.name.endswith("_bucket"):
                totals[sample.name] += sample.value
    return dict(totals)


def checks_of(health: Mapping[str, Any]) -> dict[str, Any]:
    """The checks of a service's `/health`; a Connect worker, which answers as Kafka Connect does, is one check."""
    if "checks" in health:
        return dict(health["checks"])
    status = "ok" if health["status"] in WELL else "failing"
    return {"worker": {"status": status, "detail": health["message"]}}


def failing(checks: Mapping[str, Any]) -> str:
    """The checks that fail and why, in one line."""
    return "; ".join(f"{name}: {c.get('detail') or 'failing'}" for name, c in checks.items() if c.get("status") != "ok")

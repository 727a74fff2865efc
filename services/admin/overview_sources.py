"""The sources of an overview's samples: services over HTTP, parts of this process, and Kafka."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from penstock.api.console.overview import GroupSample, KafkaSample, ServiceSample
from penstock.api.http.health import Check, CheckResult, describe_failing_checks, health_body, run_checks
from penstock.api.http.status_codes import FORBIDDEN, UNAUTHORIZED
from penstock.api.streams.task_views import StreamsState
from penstock.services.admin.routers import STREAMS
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.admin.types import DEAD
from penstock.shared.common import metrics
from penstock.shared.common.errors import (
    AuthorizationFailed,
    GroupNotFound,
    IllegalState,
    PenstockError,
    RetriableError,
)
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import decode_json
from penstock.shared.connect.redaction import without_passwords

GROUPS_MAX = 50
"""The most groups in the overview, those with members first. Each costs several requests to Kafka."""
WITHOUT_MEMBERS = ("Empty", DEAD)

KAFKA_TIMEOUT_MS = 3_000
LATENCY = "penstock_ingest_request_seconds_bucket"
TOTAL_MAX = 2.0**53
"""The largest sum of a metric in the overview: floats count exactly up to it."""
HEALTHY_STATUSES = ("ok", "healthy")
"""The `status` in `/health` of a healthy service: `ok` of Penstock's services, `healthy` of Kafka Connect."""


def services_client(timeout_ms: int, token: str | None) -> httpx.AsyncClient:
    """Return the client for requests to other services. It sends the token with each request."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(timeout=timeout_ms / 1000, headers=headers, verify=client_tls(), trust_env=False)


class Source(Protocol):
    """One service of the overview."""

    async def sample(self) -> ServiceSample:
        """Return the service's current sample. If the service fails, the sample says so, and no error is raised."""
        ...


class HttpSource:
    """A service in another process, by its `/health` and, if it has them, its `/metrics` and `/v1/streams`."""

    def __init__(self, name: str, url: str, client: httpx.AsyncClient) -> None:
        self.name = name
        self._url = url
        self._shown_url = without_passwords(url)
        self._client = client

    def __repr__(self) -> str:
        return f"HttpSource({self.name}, {self._shown_url})"

    async def check(self) -> CheckResult:
        """Return the service's own `/health` as one check."""
        try:
            body = decode_json((await self._client.get(f"{self._url}/health")).content)
            return CheckResult(body["status"] in HEALTHY_STATUSES, describe_failing_checks(checks_of(body)))
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as e:
            return CheckResult(False, f"{self._shown_url} does not answer: {type(e).__name__}: {e}".rstrip(": "))

    async def sample(self) -> ServiceSample:
        try:
            health = await self._client.get(f"{self._url}/health")
            body = decode_json(health.content)
            checks = checks_of(body)
            status = "ok" if body["status"] in HEALTHY_STATUSES else str(body["status"])
            exposition = await self._client.get(f"{self._url}/metrics")
            has_metrics = exposition.status_code != httpx.codes.NOT_FOUND
            totals = sum_metrics(exposition.raise_for_status().text) if has_metrics else {}
            streams = await self._client.get(f"{self._url}/v1/streams")
            state = decode_json(streams.content, StreamsState) if streams.status_code == httpx.codes.OK else None
            detail = describe_failing_checks(checks)
            # Other services have no streams to show. They may have other credentials.
            if self.name == STREAMS and streams.status_code in (UNAUTHORIZED, FORBIDDEN):
                detail = detail or f"/v1/streams answers {streams.status_code}; see services_auth_token of the admin"
            return ServiceSample(
                name=self.name,
                url=self._shown_url,
                status=status,
                detail=detail,
                checks=checks,
                metrics=totals,
                streams=state,
            )
        except Exception as e:
            # The address may be that of any server, and Prometheus' parser raises many errors for malformed text.
            detail = without_passwords(f"{type(e).__name__}: {e}".rstrip(": "))
            return ServiceSample(self.name, self._shown_url, "unreachable", detail)


class LocalSource:
    """A part of this process, sampled without HTTP."""

    def __init__(self, name: str, checks: Mapping[str, Check], registry: CollectorRegistry) -> None:
        self._name = name
        self._checks = checks
        self._registry = registry

    def __repr__(self) -> str:
        return f"LocalSource({self._name})"

    async def sample(self) -> ServiceSample:
        health = health_body(self._name, await run_checks(self._checks))
        return ServiceSample(
            name=self._name,
            url="",
            status=health["status"],
            detail=describe_failing_checks(health["checks"]),
            checks=health["checks"],
            metrics=sum_metrics(metrics.render(self._registry).decode()),
            streams=None,
        )


class KafkaSource:
    """The cluster and its consumer groups, through an admin client."""

    def __init__(self, admin: Admin, timeout_ms: int = KAFKA_TIMEOUT_MS) -> None:
        self._admin = admin
        self._timeout_ms = timeout_ms

    async def sample(self) -> KafkaSample:
        """Query Kafka now, and return the cluster and its consumer groups.

        Groups that the principal may not describe, and those beyond GROUPS_MAX, are only counted. If Kafka does not
        answer in time or answers with an error, the sample has only the reason, in `error`.
        """
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                cluster = await self._admin.cluster()
                # A group without members and without group management has no protocol type.
                listings = [g for g in await self._admin.list_groups() if g.protocol_type in ("consumer", "")]
                listings.sort(key=lambda g: (g.state in WITHOUT_MEMBERS, g.group_id))
                described = await asyncio.gather(*(self._sample_group(g.group_id) for g in listings[:GROUPS_MAX]))
        except TimeoutError:
            return KafkaSample(error=f"no response within {self._timeout_ms} ms")
        # This service has not connected yet, or is shutting down.
        except IllegalState:
            return KafkaSample(error="not connected; see /health")
        except PenstockError as e:
            return KafkaSample(error=str(e) or type(e).__name__)
        groups = [group for group in described if not isinstance(group, str)]
        omitted = max(0, len(listings) - GROUPS_MAX) + described.count("unauthorized")
        return KafkaSample(cluster.cluster_id, len(cluster.brokers), groups, omitted)

    async def _sample_group(self, group_id: str) -> GroupSample | Literal["deleted", "unauthorized"]:
        """Return the group's state, number of members and total lag, or the reason why it is left out."""
        try:
            description = await self._admin.describe_group(group_id)
            lag = await self._total_lag(group_id)
        except GroupNotFound:
            return "deleted"
        except AuthorizationFailed:
            return "unauthorized"
        if description.state == DEAD:
            return "deleted"
        return {"group": group_id, "state": description.state, "members": len(description.members), "lag": lag}

    async def _total_lag(self, group_id: str) -> int | None:
        """Return the group's total lag; None if it is not known, for example because a partition has no leader."""
        try:
            # Half of the sample's time limit: requests without a response are retried for longer.
            async with asyncio.timeout(self._timeout_ms / 2 / 1000):
                lags = [row.lag for row in await self._admin.group_lag(group_id)]
        except (TimeoutError, RetriableError, AuthorizationFailed):
            return None
        known = [lag for lag in lags if lag is not None]
        return sum(known) if len(known) == len(lags) else None


def sum_metrics(text: str) -> dict[str, float]:
    """Sum the samples of Prometheus' text format over their labels, by sample name.

    Only metrics of Penstock are returned. Buckets of histograms are left out, except those of the ingest latency: each
    bucket has a sum of its own, under `sample name|upper bound`. Sums that are not finite or exceed TOTAL_MAX are left
    out.
    """
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == LATENCY:
                totals[f"{LATENCY}|{float(sample.labels['le'])}"] += sample.value
            elif sample.name.startswith("penstock_") and not sample.name.endswith("_bucket"):
                totals[sample.name] += sample.value
    return {name: total for name, total in totals.items() if abs(total) <= TOTAL_MAX}


def checks_of(health: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checks in a service's `/health`.

    A Connect worker's `/health` has Kafka Connect's format, without checks. It becomes the check `worker`.
    """
    if "checks" in health:
        return dict(health["checks"])
    status = "ok" if health["status"] in HEALTHY_STATUSES else "failing"
    return {"worker": {"status": status, "detail": health["message"]}}

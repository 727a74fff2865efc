"""The overview that the dashboard polls: samples of services and of Kafka, cached for a short time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.json import encode
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from penstock.api.console.overview import KafkaSample, ServiceSample
from penstock.api.http.app import create_app, create_health_app
from penstock.api.http.health import CheckResult, health_router
from penstock.api.streams.routes import streams_router
from penstock.api.streams.task_views import StreamsState
from penstock.services.admin.cached_overview import CACHE_MS, SAMPLE_INTERVAL_MS, CachedOverview
from penstock.services.admin.overview_sources import (
    GROUPS_MAX,
    HttpSource,
    KafkaSource,
    LocalSource,
    services_client,
    sum_metrics,
)
from penstock.shared.clients.admin import Admin, GroupDescription, GroupListing, PartitionLag
from penstock.shared.common import metrics
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    GroupNotFound,
    NotLeaderOrFollower,
    PenstockError,
)
from tests.api.admin.test_administration import MemoryAdmin
from tests.api.streams.test_queries import STATE
from tests.integration.certificates import serving_with_trust
from tests.virtual_time import run


class View:
    """One task."""

    async def describe(self) -> StreamsState:
        return STATE


def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    late = metrics.counter(registry, "streams_late_records", "Late.", "partition")
    late.labels(partition="0").inc(2)
    late.labels(partition="1").inc(3)
    metrics.histogram(registry, "ingest_request_seconds", "Seconds.").observe(0.2)
    return registry


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app))


async def test_a_service_is_read_through_http() -> None:
    """A sample has the health with its reason, metrics summed over labels, and the streams if the service has them."""
    app = create_health_app("aggregator", {"kafka": lambda: CheckResult(False, "no broker")}, registry())
    app.include_router(streams_router(View()))
    sample = await HttpSource("aggregator", "http://a", client(app)).sample()
    assert (sample.status, sample.detail) == ("failing", "kafka: no broker")
    assert sample.metrics["penstock_streams_late_records_total"] == 5
    assert sample.streams == STATE


async def test_a_service_that_rejects_the_token_has_unknown_streams() -> None:
    """A sample names the setting of the token if the aggregator rejects it. Other services have no streams to show."""
    app = create_app(health=health_router("a", {}, registry()), auth_token=SecretStr("0123456789abcdef"))
    for name, detail in (("aggregator", "/v1/streams answers 401; see services_auth_token of the admin"), ("x", "")):
        sample = await HttpSource(name, "http://a", client(app)).sample()
        assert (sample.status, sample.streams, sample.detail) == ("ok", None, detail)


async def test_a_service_with_a_certificate_of_an_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service over TLS is read if the system trusts the authority of its certificate."""
    app = create_health_app("a", {}, registry())
    async with serving_with_trust(app, tmp_path, monkeypatch) as server, services_client(10_000, None) as client:
        assert await HttpSource("a", server.url, client).check() == CheckResult(True, "")


async def test_a_services_health_as_one_check() -> None:
    """The check of a service is ok, fails with the reasons of its checks, or reports that the
    service does not answer.
    """
    for ok, detail in ((True, ""), (False, "kafka: no broker")):
        app = create_health_app("a", {"kafka": lambda ok=ok: CheckResult(ok, "no broker")}, registry())  # type: ignore[misc]
        assert await HttpSource("a", "http://a", client(app)).check() == CheckResult(ok, detail)
    unreachable = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(502, text="<html>")))
    result = await HttpSource("a", "http://a", unreachable).check()
    assert (result.ok, "http://a does not answer" in result.detail) == (False, True)


async def test_a_connect_worker_is_a_service_too() -> None:
    """A Connect worker's health is one check, with the reason if it fails."""
    for status, ok in (("healthy", True), ("starting", False)):
        body = {"status": status, "message": "as it is"}
        response = httpx.Response(200 if ok else 503, json=body)
        worker = httpx.AsyncClient(transport=httpx.MockTransport(lambda _request, response=response: response))
        assert await HttpSource("connect", "http://c", worker).check() == CheckResult(
            ok, "" if ok else "worker: as it is"
        )


async def test_a_worker_of_apache_kafka_is_sampled_without_metrics() -> None:
    """A 404 of the metrics route is no error: a worker of Apache Kafka has none over HTTP."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json={"status": "healthy", "message": "Worker has completed startup."})
        return httpx.Response(404, json={"error_code": 404, "message": "HTTP 404 Not Found"})

    worker = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    sample = await HttpSource("connect", "http://c", worker).sample()
    assert (sample.status, list(sample.checks), sample.metrics) == ("ok", ["worker"], {})


async def test_a_service_without_streams_has_none() -> None:
    """A 404 of the streams route is no error: the sample has no streams."""
    sample = await HttpSource("consumer", "http://c", client(create_health_app("consumer", {}, registry()))).sample()
    assert (sample.status, sample.streams) == ("ok", None)


@pytest.mark.parametrize(
    "response",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout(""),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, json=[]),
        httpx.Response(404, json={"detail": "no"}),
    ],
)
async def test_a_service_without_a_valid_response_is_unreachable(response: httpx.Response | Exception) -> None:
    """An invalid response or an error yields an unreachable sample."""

    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    source = HttpSource("p", "http://p", httpx.AsyncClient(transport=httpx.MockTransport(handle)))
    sample = await source.sample()
    assert sample.status == "unreachable"
    assert sample.detail
    assert not (await source.check()).ok


async def test_a_service_with_an_invalid_check_is_unreachable() -> None:
    """A check that is no object yields an unreachable sample, even if the other responses are valid."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json={"status": "ok", "checks": {"kafka": "text"}})
        return httpx.Response(404 if request.url.path == "/v1/streams" else 200)

    source = HttpSource("p", "http://p", httpx.AsyncClient(transport=httpx.MockTransport(handle)))
    sample = await source.sample()
    assert sample.status == "unreachable"
    assert "AttributeError" in sample.detail


async def test_a_service_whose_metrics_fail_is_unreachable() -> None:
    """Metrics with an error's status yield an unreachable sample, even if the body is empty. The reason hides the
    address' password.
    """

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json={"status": "ok", "checks": {}})
        return httpx.Response(503 if request.url.path == "/metrics" else 404)

    source = HttpSource("p", "http://ann:s3cret@p", httpx.AsyncClient(transport=httpx.MockTransport(handle)))
    sample = await source.sample()
    assert sample.status == "unreachable"
    assert "503" in sample.detail
    assert "s3cret" not in sample.detail


STORED = "penstock_ingest_stored_records_total"


def service(**contents: bytes) -> httpx.AsyncClient:
    """A service whose routes have these contents, or else valid ones."""
    valid = {"health": b'{"status": "ok", "checks": {}}', "metrics": f"{STORED} 7\n".encode(), "streams": encode(STATE)}

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(valid | contents)[request.url.path.rpartition("/")[2]])

    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("url", "contents"),
    [
        ("http://p\n", {}),
        ("http://p", {"metrics": b'a{x="1", ="y"} 1\n'}),
        ("http://p", {"metrics": STORED.encode() + b" " + b"9" * 400 + b"\n"}),
        ("http://p", {"streams": b"[]"}),
        ("http://p", {"streams": encode({**STATE, "tasks": [{**STATE["tasks"][0], "late_records": "many"}]})}),
        ("http://p", {"streams": encode({**STATE, "tasks": [{"partition": None}]})}),
    ],
)
async def test_an_invalid_service_is_unreachable_beside_the_others(url: str, contents: dict[str, bytes]) -> None:
    """A service with an invalid address or response is unreachable in the overview, with the reason. The other
    services are shown.
    """
    sources = [HttpSource("invalid", url, service(**contents)), HttpSource("valid", "http://v", service())]
    overview = await CachedOverview(sources, Kafka(), clock=Clock()).overview()  # type: ignore[arg-type]
    assert [row["status"] for row in overview["services"]] == ["unreachable", "ok"]
    assert overview["services"][0]["detail"]
    assert overview["ingest"]["stored"] == 7
    assert [task["partition"] for task in overview["streams"]["tasks"]] == [0]


async def test_a_password_in_an_address_is_sent_but_not_shown() -> None:
    """A request has the credentials in the service's address. The samples, the check and the `repr` hide the password,
    also if the service does not answer.
    """
    sent = set()

    def handle(request: httpx.Request) -> httpx.Response:
        sent.add(request.headers["Authorization"])
        return httpx.Response(502)

    source = HttpSource("a", "http://ann:s3cret@a", httpx.AsyncClient(transport=httpx.MockTransport(handle)))
    valid = HttpSource("a", "http://ann:s3cret@a", service())
    for shown in (await valid.sample(), await source.sample(), await source.check(), source):
        assert "http://ann:[hidden]@a" in repr(shown)
        assert "s3cret" not in repr(shown)
    assert sent == {"Basic " + base64.b64encode(b"ann:s3cret").decode()}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e300"])
async def test_a_metric_that_counts_nothing_is_unknown(value: str) -> None:
    """A service whose metric is not finite, or too large for a count, is shown without this metric."""
    sources = [
        HttpSource("odd", "http://o", service(metrics=f"{STORED} {value}\n".encode())),
        HttpSource("valid", "http://v", service()),
    ]
    overview = await CachedOverview(sources, Kafka(), clock=Clock()).overview()  # type: ignore[arg-type]
    assert [row["status"] for row in overview["services"]] == ["ok", "ok"]
    assert overview["ingest"]["stored"] == 7


async def test_a_check_without_a_count_of_changelog_records_has_no_estimate() -> None:
    """The duration of a restore is unknown if the compaction check has no number of changelog records."""
    tasks = [{**STATE["tasks"][0], "restore_ms": 5}]
    health = {"status": "ok", "checks": {"compaction": {"status": "ok", "changelog_records": "many"}}}
    source = HttpSource("a", "http://a", service(health=encode(health), streams=encode({**STATE, "tasks": tasks})))
    overview = await CachedOverview([source], Kafka(), clock=Clock()).overview()  # type: ignore[arg-type]
    assert [row["status"] for row in overview["services"]] == ["ok"]
    assert overview["streams"]["restore_estimate_s"] is None


async def test_a_part_of_this_process_is_read_without_http() -> None:
    """A part of this process has the same sample, without an address."""
    sample = await LocalSource("a", {"kafka": lambda: CheckResult(True)}, registry()).sample()
    assert (sample.status, sample.url, sample.detail) == ("ok", "", "")
    assert sample.metrics["penstock_streams_late_records_total"] == 5


def test_foreign_metrics_and_buckets_are_left_out() -> None:
    """Only Penstock's metrics are kept, and only the histogram buckets of the ingest's latency."""
    text = metrics.render(registry()).decode() + "python_info 1\n"
    assert {name for name in sum_metrics(text) if "|" not in name} == {
        "penstock_streams_late_records_total",
        "penstock_ingest_request_seconds_count",
        "penstock_ingest_request_seconds_sum",
    }


class Down:
    """An admin client whose brokers are unreachable or do not respond."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    async def cluster(self) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        raise BrokerNotAvailable("no broker")


async def test_an_unreachable_kafka_is_an_error_of_the_sample() -> None:
    """The sample of an unreachable or silent Kafka has the error, also before the first connection."""
    assert (await KafkaSource(Admin("127.0.0.1:1")).sample()).error == "not connected; see /health"
    assert (await KafkaSource(Down(silent=False)).sample()).error == "no broker"  # type: ignore[arg-type]
    assert (await KafkaSource(Down(silent=True), timeout_ms=5).sample()).error == "no response within 5 ms"  # type: ignore[arg-type]


class Busy(MemoryAdmin):
    """Many groups. One is deleted after it is listed, and the last has members."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {f"g{i:03}": {} for i in range(GROUPS_MAX + 20)}

    async def list_groups(self) -> list[GroupListing]:
        *others, last = await super().list_groups()
        return [*others, GroupListing(last.group_id, "Stable", "consumer")]

    async def group_lag(self, group_id: str) -> list[PartitionLag]:
        if group_id == "g000":
            raise GroupNotFound(group_id)
        return await super().group_lag(group_id)


async def test_groups_beyond_the_limit_are_counted_and_deleted_ones_left_out() -> None:
    """Groups with members come first, those beyond the limit are counted, and a group deleted
    between two requests is left out.
    """
    sample = await KafkaSource(Busy()).sample()
    assert (sample.error, sample.groups_omitted) == ("", 20)
    names = [group["group"] for group in sample.groups]
    assert names[0] == f"g{GROUPS_MAX + 19:03}"
    assert "g000" not in names
    assert len(names) == GROUPS_MAX - 1


class Restricted(MemoryAdmin):
    """The principal may list the group `secret`, but may not describe it."""

    def __init__(self) -> None:
        super().__init__()
        self.groups["secret"] = {}

    async def describe_group(self, group_id: str) -> GroupDescription:
        if group_id == "secret":
            raise AuthorizationFailed("group secret")
        return await super().describe_group(group_id)


async def test_a_group_that_may_not_be_described_is_only_counted() -> None:
    """A group that the principal may not describe is counted as omitted, and the sample has all else."""
    sample = await KafkaSource(Restricted()).sample()
    assert (sample.error, sample.cluster_id, sample.groups_omitted) == ("", "c-1", 1)
    assert [group["group"] for group in sample.groups] == ["banks"]


class WithoutLag(MemoryAdmin):
    """Kafka does not return the lag of one of its two groups: `error` says why, or is None if there is no response."""

    def __init__(self, error: PenstockError | None) -> None:
        super().__init__()
        self.groups["visits"] = self.groups["banks"]
        self.error = error

    async def group_lag(self, group_id: str) -> list[PartitionLag]:
        if group_id == "banks":
            if self.error is None:
                await asyncio.Event().wait()
            else:
                raise self.error
        return await super().group_lag(group_id)


@pytest.mark.parametrize("error", [None, NotLeaderOrFollower("no leader"), AuthorizationFailed("topic flights")])
def test_a_group_whose_lag_is_unknown_is_shown_without_it(error: PenstockError | None) -> None:
    """If Kafka does not return the lag of a group, the sample has the group without a lag, and all else."""
    sample = run(KafkaSource(WithoutLag(error)).sample())
    assert (sample.error, sample.cluster_id) == ("", "c-1")
    assert [(group["group"], group["state"], group["lag"]) for group in sample.groups] == [
        ("banks", "Empty", None),
        ("visits", "Empty", 12),
    ]


async def test_the_lag_of_a_group_with_a_partition_without_a_leader_is_unknown() -> None:
    """If a partition has no leader, the sample has the group without a lag, because the sum would be too small."""
    admin = MemoryAdmin()
    admin.offline = {next(iter(admin.groups["banks"]))}
    sample = await KafkaSource(admin).sample()
    assert (sample.error, [(group["group"], group["lag"]) for group in sample.groups]) == ("", [("banks", None)])


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms


class Counting:
    """A source that counts its requests."""

    def __init__(self) -> None:
        self.requests = 0

    async def sample(self) -> ServiceSample:
        self.requests += 1
        await asyncio.sleep(0)
        return ServiceSample("p", "", "ok", metrics={"penstock_ingest_stored_records_total": self.requests * 100.0})


class Kafka:
    """A cluster without groups."""

    async def sample(self) -> KafkaSample:
        return KafkaSample("c-1", 1)


async def test_concurrent_requests_sample_the_sources_once() -> None:
    """Within CACHE_MS all requests share one response, also those that arrive while it is built."""
    clock, source = Clock(), Counting()
    overview = CachedOverview([source], Kafka(), clock=clock)  # type: ignore[arg-type]
    first = await asyncio.gather(*(overview.overview() for _ in range(5)))
    assert source.requests == 1
    assert all(response == first[0] for response in first)
    clock.ms = CACHE_MS - 1
    await overview.overview()
    assert source.requests == 1


async def test_the_sources_are_sampled_again_after_cache_ms() -> None:
    """After CACHE_MS the sources are sampled again; rates are known from the second response on."""
    clock, source = Clock(), Counting()
    overview = CachedOverview([source], Kafka(), clock=clock)  # type: ignore[arg-type]
    assert (await overview.overview())["ingest"]["records_per_second"] is None
    clock.ms = 1_000
    assert (await overview.overview())["ingest"]["records_per_second"] == 100
    assert source.requests == 2


async def test_an_invalidated_overview_is_built_again() -> None:
    """The sources are read again after a change. A response in flight at that time is returned, but not cached."""
    clock, source = Clock(), Counting()
    overview = CachedOverview([source], Kafka(), clock=clock)  # type: ignore[arg-type]
    await overview.overview()
    overview.invalidate()
    pending = asyncio.create_task(overview.overview())
    while source.requests < 2:  # noqa: ASYNC110 - the request is made within two iterations of the loop
        await asyncio.sleep(0)
    overview.invalidate()
    await pending
    await overview.overview()
    await overview.overview()
    assert source.requests == 3


class Defective:
    """A source whose first sample fails by a defect."""

    def __init__(self) -> None:
        self.requests = 0

    async def sample(self) -> ServiceSample:
        self.requests += 1
        if self.requests == 1:
            raise ZeroDivisionError
        return ServiceSample("p", "", "ok")


def test_an_overview_that_cannot_be_built_is_built_at_the_next_interval() -> None:
    """An unexpected error while an overview is built does not end the service: the next interval builds it again."""
    overview = CachedOverview([Defective()], Kafka(), clock=Clock())  # type: ignore[arg-type]

    async def run_two_intervals() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5 * SAMPLE_INTERVAL_MS / 1000):
                await overview.run()

    run(run_two_intervals())
    assert len(overview.history()) == 1

"""The view of a whole application as one instance reports it.

The other instances are real apps, called without a network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.http.problem import Problem
from penstock.api.http.server import HttpServer
from penstock.api.settings import Credential
from penstock.api.streams.routes import streams_router
from penstock.api.streams.stores import stores_router
from penstock.api.streams.task_views import OpenWindows, StreamsState
from penstock.services.aggregator.application_view import RESPONSE_BYTES_MAX, ApplicationView
from penstock.services.aggregator.continuations import open_window_pages, page_with_continuation, row_pages
from penstock.services.aggregator.settings import QueriesSettings
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.row_positions import OpenPosition, RowOrder, RowPosition, row_order
from penstock.shared.common.settings import HttpSettings
from penstock.shared.streams.runtime.instances import Instances, Registration, encode_registration
from penstock.shared.streams.runtime.queries import StoreResponse, query_position
from tests.integration.certificates import Authority

A, B = "http://a", "http://b"


class Instance:
    """An instance with a row, a window and a task in each of its partitions; with `keys` it has a row for each key."""

    application = "x"
    key_type: Any = "string"

    def __init__(self, name: str, running: dict[int, int], restoring: tuple[int, ...] = (), keys: int = 0) -> None:
        self.name, self.running, self.restoring, self.compactions = name, running, restoring, 0
        self.keys = [f"k{i}" for i in range(keys)]
        self.standbys: list[int] = []

    def registration(self) -> Registration:
        return Registration(self.name, self.running, 3, list(self.restoring))

    async def describe(self) -> StreamsState:
        states = [*((p, "running") for p in self.running), *((p, "restoring") for p in self.restoring)]
        tasks: Any = [{"partition": p, "state": state, "instance": self.name} for p, state in states]
        standbys = [{"partition": p, "lag": 0, "instance": self.name} for p in self.standbys]
        state: Any = {"application_id": "x", "instance": self.name, "tasks": tasks, "standbys": standbys}
        return {**state, "compactions": [{"detail": self.name}]}  # type: ignore[typeddict-item]

    def stores(self) -> list[dict[str, Any]]:
        return [{"store": "s", "rows": {str(p): p + 1 for p in self.running}, "total": 0}]

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> OpenWindows:
        pages = open_window_pages(self.application, store, key)
        after = pages.decode(continuation)
        ends = {(p, key): p + i % 3 for p in self.running for i, key in enumerate(self.keys or [self.name])}
        positions = sorted(OpenPosition(-end, "s", p, key, 0) for (p, key), end in ends.items())
        rest = [position for position in positions if after is None or position > after]
        rows: Any = [{**one._asdict(), "end_ms": -one.negated_end_ms, "results": {}} for one in rest[:limit]]
        last = rest[limit - 1] if len(rest) > limit else None
        return {"windows": rows, "continuation": pages.encode(last), "unseen": 1}

    async def read_store(self, store: str, **wanted: Any) -> dict[str, Any]:
        pages = row_pages(self.application, store, wanted)
        if store == "g":
            table = [{"key": "k", "value": self.name}]
            return page_with_continuation(StoreResponse("g", "global table", "string", table, {0: {"g": 3}}), pages)
        if store != "s":
            raise ConfigError(f"the topology has no store {store!r}")
        rows: list[dict[str, Any]] = [
            {"partition": p, "key": key.encode() if self.key_type == "bytes" else key, "start": at, "end": at}
            for p in sorted(self.running)
            for key in (self.keys or [wanted["key"] or self.name])
            for at in (5, 7)[: 1 + bool(self.keys)]
        ]
        rows.sort(key=lambda row: order(query_position(row)))
        after = pages.decode(wanted["continuation"])
        rest = [row for row in rows if after is None or order(query_position(row)) > order(after)]
        cut, position = rest[: wanted["rows_max"]], {p: {"in": epoch} for p, epoch in self.running.items()}
        last = query_position(cut[-1]) if len(cut) < len(rest) else None
        return page_with_continuation(StoreResponse("s", "session", self.key_type, cut, position, last), pages)

    def compact(self) -> str:
        self.compactions += 1
        return "one is running" if self.compactions > 1 else ""


def order(position: RowPosition) -> tuple[int, RowOrder]:
    return position.partition, row_order(position.key, position.start)


Hook = Callable[[httpx.Request], Awaitable[httpx.Response | None]]


async def no_response(request: httpx.Request) -> httpx.Response | None:
    return None


class Net(httpx.AsyncBaseTransport):
    """Passes requests to the instances by their address. `hook` may respond instead of them."""

    def __init__(self, hook: Hook = no_response, **instances: Any) -> None:
        self._apps = {name: httpx.ASGITransport(app) for name, app in instances.items()}
        self._hook = hook
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        response = await self._hook(request)
        return await self._apps[request.url.host].handle_async_request(request) if response is None else response


def app_of(instance: Instance, **guard: Any) -> Any:
    return create_app(streams=streams_router(instance, stores_router(instance)), **guard)


def application_view(own: Instance, *others: tuple[str, Instance], net: Net | None, **settings: Any) -> ApplicationView:
    """The whole application as instance A reports it, after it has read the metadata of all instances."""
    known = Instances()
    for offset, (url, one) in enumerate([(A, own), *others]):
        known.apply(offset, url.encode(), encode_registration(one.registration()), 0)
    tokens = settings.pop("tokens", {})
    why = settings.pop("why_unknown", str)
    made = ApplicationView(own, known, QueriesSettings(**settings), tokens, CollectorRegistry(), why, net)
    made.url = A
    return made


WANTED: dict[str, Any] = {"key": None, "key_from": None, "key_to": None, "from_ms": None, "to_ms": None}
WANTED |= {"rows_max": 9, "continuation": None}


async def test_each_partition_comes_from_its_owner() -> None:
    """Rows, positions, windows, stores and tasks of both instances are returned, without a
    zombie's data of lost partitions.
    """
    own, other = Instance("a", {0: 2, 1: 1}), Instance("b", {1: 2, 2: 7})
    made = application_view(own, (B, other), net=Net(b=app_of(other)))
    response = await made.read_store("s", partial=False, **WANTED)
    assert [(row["partition"], row["key"]) for row in response["rows"]] == [(0, "a"), (1, "b"), (2, "b")]
    assert response["position"] == {"0": {"in": 2}, "1": {"in": 2}, "2": {"in": 7}}
    assert (response["missing"], response["is_cut"], response["kind"]) == ([], False, "session")
    assert (await made.stores())["stores"] == [{"store": "s", "rows": {"0": 1, "1": 2, "2": 3}, "total": 6}]
    assert [row["key"] for row in (await made.windows(None, "", 2, None))["windows"]] == ["b", "b"]
    state: Any = await made.describe()
    assert [(task["partition"], task["instance"]) for task in state["tasks"]] == [(0, "a"), (1, "b"), (2, "b")]
    assert (state["missing"], [each["url"] for each in state["instances"]]) == ([], [A, B])
    assert state["compactions"] == [{"detail": "a"}]
    await made.close()


async def test_standbys_of_instances_without_partitions_are_listed() -> None:
    """The standbys of instances that run no partition are listed too; such an instance that does not answer has none,
    and makes no partition missing.
    """
    own, spare, gone = Instance("a", {0: 1, 1: 1}), Instance("b", {}, (2,)), Instance("c", {})
    spare.standbys = [1, 0]

    async def fail(request: httpx.Request) -> httpx.Response | None:
        if request.url.host == "c":
            raise httpx.ConnectError("refused", request=request)
        return None

    net = Net(fail, b=app_of(spare))
    former = Instance("d", {0: 0})
    made = application_view(own, (B, spare), ("http://c", gone), ("http://d", former), net=net)
    state: Any = await made.describe()
    assert state["standbys"] == [{"partition": p, "lag": 0, "instance": "b"} for p in (0, 1)]
    assert [task["partition"] for task in state["tasks"]] == [0, 1, 2]
    assert [request.url.host for request in net.requests] == ["b", "c"], "not the former owner of partition 0"
    assert state["missing"] == [{"partition": 2, "reason": f"being restored by {B}"}]


async def test_requests_to_other_instances_are_local_and_carry_the_token() -> None:
    """A request to another instance has the same parameters and `local=true`, and only the token for the instances."""
    own, other = Instance("a", {0: 1}), Instance("b", {1: 1, 2: 1})
    net = Net(b=app_of(other, credentials={"all": Credential(secret="x" * 16, scopes=("admin",))}))
    made = application_view(own, (B, other), net=net, tokens={"read": "x" * 16})
    table = await made.read_store("g", partial=False, **WANTED)  # A global table is complete on every instance.
    assert (table["rows"], table["missing"], net.requests) == ([{"key": "k", "value": "a"}], [], [])
    response = await made.read_store("s", partial=False, **WANTED | {"key": "ann", "from_ms": 5})
    assert {row["key"] for row in response["rows"]} == {"ann"}
    (request,) = net.requests
    assert dict(request.url.params) == {"key": "ann", "from_ms": "5", "rows_max": "9", "local": "true"}
    assert request.headers["authorization"] == f"Bearer {'x' * 16}"
    rejected = await application_view(own, (B, other), net=net).stores()
    assert [row["reason"] for row in rejected["missing"]] == [
        f"{B}: answers 401: send Authorization: Bearer <token> or basic auth"
    ] * 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("gone", "ConnectError: refused"),
        ("silent", "no response within 1 ms"),
        ("no json", "InvalidJson: "),
        ("too deep", "InvalidJson: nested too deeply"),
        ("endless", f"a response of more than {RESPONSE_BYTES_MAX} bytes"),
        ("500", "answers 500: it broke"),
    ],
)
async def test_an_instance_without_a_valid_response_is_missing(fault: str, reason: str) -> None:
    """Reading rows is a 503 with Retry-After and the reason, unless a partial result is
    accepted; other results list the missing partitions.
    """

    async def fail(request: httpx.Request) -> httpx.Response | None:
        match fault:
            case "gone":
                raise httpx.ConnectError("refused", request=request)
            case "silent":
                await asyncio.Event().wait()
            case "no json":
                return httpx.Response(200, text="<html>")
            case "too deep":
                return httpx.Response(200, content=b'{"a":' * 100_000)
            case "endless":
                return httpx.Response(200, content=b"[" * (RESPONSE_BYTES_MAX + 1))
        return httpx.Response(500, json={"detail": "it broke"})

    own, other = Instance("a", {0: 1}), Instance("b", {1: 1, 2: 1})
    made = application_view(own, (B, other), net=Net(fail), timeout_ms=1 if fault == "silent" else 10_000)
    with pytest.raises(Problem) as raised:
        await made.read_store("s", partial=False, **WANTED)
    assert (raised.value.kind.status, raised.value.kind.retry_after_s) == (503, 1)
    assert f"partition 1: {B}: " in raised.value.detail
    response = await made.read_store("s", partial=True, **WANTED)
    assert [row["partition"] for row in response["rows"]] == [0]
    assert [row["partition"] for row in response["missing"]] == [1, 2]
    assert all(reason in row["reason"] for row in response["missing"])
    assert len((await made.describe())["missing"]) == 2


async def test_partitions_without_a_running_task_are_missing() -> None:
    """A partition is missing if it is restoring, if no instance has it, or if its task has just ended."""
    own, other = Instance("a", {}, (0,)), Instance("b", {1: 1})
    net = Net(b=app_of(Instance("b", {})))
    made = application_view(own, (B, other), net=net)
    response = await made.read_store("s", partial=True, **WANTED)
    assert {row["partition"]: row["reason"] for row in response["missing"]} == {
        0: f"being restored by {A}",
        1: "its task has just gone",
        2: "no instance has it",
    }
    state: Any = await made.describe()
    assert [(task["partition"], task["state"]) for task in state["tasks"]] == [(0, "restoring")]
    with pytest.raises(ConfigError, match="store 'x'"):
        await made.read_store("x", partial=True, **WANTED)


async def test_a_task_that_is_being_restored_comes_from_the_instance_that_restores_it() -> None:
    """The state has the restoring tasks of this instance and of another one, even if that one also runs a task. While
    the other instances are not known, it has this instance's own, and that partition keeps its reason.
    """
    own, other = Instance("a", {}, (0,)), Instance("b", {1: 1}, (2,))
    net = Net(b=app_of(other))
    state: Any = await application_view(own, (B, other), net=net).describe()
    tasks = [(task["partition"], task["state"], task["instance"]) for task in state["tasks"]]
    assert tasks == [(0, "restoring", "a"), (1, "running", "b"), (2, "restoring", "b")]
    assert len(net.requests) == 1
    state = await application_view(own, net=Net(), why_unknown=lambda: "not allowed").describe()
    assert [(task["partition"], task["state"]) for task in state["tasks"]] == [(0, "restoring")]
    unknown = "other instances are not known: not allowed"
    assert [row["reason"] for row in state["missing"]] == [f"being restored by {A}", unknown, unknown]


async def test_an_instance_without_metadata_reports_it() -> None:
    """Before an instance knows the topics a query is a Problem; if the other instances cannot
    be known, the reason is reported.
    """
    own = Instance("a", {})
    starting = ApplicationView(own, Instances(), QueriesSettings(), {}, CollectorRegistry(), str, Net())
    own.registration = lambda: Registration("a")  # type: ignore[method-assign]
    for response in (
        starting.read_store("s", partial=True, **WANTED),
        starting.stores(),
        starting.windows(None, "", 9, None),
    ):
        with pytest.raises(Problem, match="source topics"):
            await response
    alone = application_view(Instance("a", {0: 1}), net=Net(), why_unknown=lambda: "not allowed")
    reasons = {row["reason"] for row in (await alone.stores())["missing"]}
    assert reasons == {"other instances are not known: not allowed"}


async def test_rows_are_cut_over_all_instances() -> None:
    """The limit applies to the rows of all instances together, and the result shows that there are more."""
    own, other = Instance("a", {0: 1}), Instance("b", {1: 1, 2: 1})
    made = application_view(own, (B, other), net=Net(b=app_of(other)))
    response = await made.read_store("s", partial=False, **WANTED | {"rows_max": 2})
    assert ([row["partition"] for row in response["rows"]], response["is_cut"]) == ([0, 1], True)


@pytest.mark.parametrize("key_type", ["string", "bytes"])
@pytest.mark.parametrize("zombie", [False, True])
async def test_pages_over_instances_equal_those_of_one(zombie: bool, key_type: str, monkeypatch: Any) -> None:
    """Pages contain each row and window once, in one order, whichever instance answers, and
    also if a zombie's page is full of lost partitions.
    """
    monkeypatch.setattr(Instance, "key_type", key_type)
    alone = application_view(Instance("all", {0: 1, 1: 2, 2: 3}, keys=9), net=Net())
    a, b = Instance("a", {0: 1, 2: 3}, keys=9), Instance("b", {0: 0, 1: 2} if zombie else {1: 2}, keys=9)
    known = {A: a, B: b}
    views = [application_view(one, *known.items(), net=Net(a=app_of(a), b=app_of(b))) for one in (a, b)]
    for view, url in zip(views, known, strict=True):
        view.url = url
    rows = (await alone.read_store("s", partial=False, **WANTED | {"rows_max": 99}))["rows"]
    windows = (await alone.windows(None, "", 99, None))["windows"]
    assert (len(rows), len(windows)) == (3 * 9 * 2, 3 * 9)
    for size in (1, 4, 18, 53, 54):
        found, continuation = [], None
        for turn in range(99):
            query = WANTED | {"rows_max": size, "continuation": continuation}
            page = await views[turn % 2].read_store("s", partial=False, **query)
            found += page["rows"]
            assert (len(page["rows"]) <= size, page["is_cut"]) == (True, page["continuation"] is not None)
            if (continuation := page["continuation"]) is None:
                break
        assert found == rows
        seen, continuation = [], None
        for turn in range(99):
            part = await views[turn % 2].windows(None, "", size, continuation)
            seen += part["windows"]
            if (continuation := part["continuation"]) is None:
                break
        assert (seen, part["unseen"]) == (windows, 2)


async def test_a_continuation_of_another_query_is_rejected() -> None:
    """A continuation is valid only for the same store, key and application; the page size may change."""
    made = application_view(Instance("a", {0: 1}, keys=9), net=Net())
    first = await made.read_store("s", partial=True, **WANTED)
    on = WANTED | {"continuation": first["continuation"]}
    assert len((await made.read_store("s", partial=True, **on | {"rows_max": 20}))["rows"]) == 9
    with pytest.raises(WrongContinuation, match=first["continuation"]):
        await made.read_store("s", partial=True, **on | {"key_to": "k"})
    with pytest.raises(WrongContinuation, match="'x' is invalid"):
        await made.windows(None, "", 2, "x")
    Instance.application, before = "y", Instance.application
    try:
        with pytest.raises(WrongContinuation, match="belongs to another query"):
            await made.read_store("s", partial=True, **on)
    finally:
        Instance.application = before


async def test_a_compaction_is_requested_from_its_owner() -> None:
    """The compaction is requested from the owner of partition 0 and its rejection is returned
    unchanged; without an owner it is a Problem.
    """
    own, other = Instance("a", {1: 1}), Instance("b", {0: 1})
    net = Net(b=app_of(other))
    made = application_view(own, (B, other), net=net)
    assert [await made.compact(), await made.compact()] == ["", "one is running"]
    assert (other.compactions, own.compactions) == (2, 0)
    assert await application_view(Instance("a", {0: 1}), net=net).compact() == ""
    with pytest.raises(Problem, match="no instance has it"):
        await application_view(own, net=net).compact()


async def test_other_instances_are_verified_by_the_configured_authority(tmp_path: Path) -> None:
    """With the authority's file the others respond; without it they are missing, and the
    reason names the certificate.
    """
    authority, own, other = Authority(tmp_path, "authority"), Instance("a", {0: 1}), Instance("b", {1: 1, 2: 1})
    server = HttpServer(app_of(other), HttpSettings(ssl_certfile=authority.issue("server")))
    await server.start()
    try:
        trusting = application_view(own, (server.url, other), net=None, ssl_cafile=authority.cafile)
        assert (await trusting.stores())["missing"] == []
        doubting = application_view(own, (server.url, other), net=None)
        assert "CERTIFICATE_VERIFY_FAILED" in (await doubting.stores())["missing"][0]["reason"]
        for one in (trusting, doubting):
            await one.close()
    finally:
        await server.stop(1_000)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_unreadable_authority_is_an_error(tmp_path: Path, content: str | None) -> None:
    """An unreadable authority file is a ConfigError at start-up."""
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"queries\.ssl_cafile: .*ca\.pem: "):
        ApplicationView(Instance("a", {}), Instances(), QueriesSettings(ssl_cafile=file), {}, CollectorRegistry())

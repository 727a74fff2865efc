"""The view of the whole application by one of its instances, which queries the others over HTTP.

A Kafka topic lists the instances and the partitions that each one owns. An instance is queried with `local=true`: its
response is about itself alone, so requests do not loop. A request has the timeout `timeout_ms`, and its response has at
most `RESPONSE_BYTES_MAX`. The partitions of an instance that does not answer are listed as missing. Requests are not
retried: the client can retry.

The responses are merged: each partition comes only from the instance that owns it. An instance that does not know yet
that it lost a partition still reports it. That part of its response is dropped.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar, Unpack
from urllib.parse import quote

import httpx
import msgspec
from prometheus_client import CollectorRegistry

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import SERVICE_UNAVAILABLE
from penstock.api.settings import Scope
from penstock.api.streams.query_params import StoreQueryParams, encode_query_params
from penstock.api.streams.task_views import (
    InstanceRow,
    MissingPartition,
    StandbyState,
    StreamsState,
    StreamsView,
    TaskState,
)
from penstock.services.aggregator.continuations import open_window_pages, row_pages
from penstock.services.aggregator.settings import QueriesSettings
from penstock.shared.common.continuation_codec import ContinuationCodec
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.metrics import counter
from penstock.shared.common.row_positions import OpenPosition, RowOrder, RowPosition, row_order
from penstock.shared.streams.runtime.instances import Instances, PartitionOwners, Registration, partition_owners

OrderT = TypeVar("OrderT", bound=tuple[Any, ...])
RowT = TypeVar("RowT")

RESPONSE_BYTES_MAX = 64 * 1024 * 1024
"""The largest response of one instance: ten thousand rows of some kilobytes."""
CONNECTIONS_MAX = 64
"""The most open connections to all other instances."""
RETRY_AFTER_S = 1
INCOMPLETE = ErrorKind(SERVICE_UNAVAILABLE, "PARTITIONS_MISSING", "Not all partitions can be read now", RETRY_AFTER_S)
NOT_REACHED = ErrorKind(
    SERVICE_UNAVAILABLE, "INSTANCE_NOT_REACHED", "The instance that compacts does not answer", RETRY_AFTER_S
)
COMPACTION_PARTITION = 0
"""The instance that owns this partition requests compactions."""
GLOBAL_TABLE = "global table"


class OwnInstanceView(StreamsView, Protocol):
    """The view of this instance alone, whose responses are merged with those of the other instances."""

    @property
    def application(self) -> str:
        """The application id of this instance."""
        ...

    def registration(self) -> Registration:
        """Return the partitions of this instance, for the view of the application."""
        ...

    async def read_store(self, store: str, **params: Unpack[StoreQueryParams]) -> Any:
        """Return this instance's rows of a store, for the view of the application.

        See `penstock.api.streams.stores.StoresView.read_store`.
        """
        ...


class InstanceQueryFailed(Exception):
    """A queried instance returned no usable response. The message has the reason.

    If the instance returned an error, `status` and `detail` are those of the error.
    """

    def __init__(self, reason: str, status: int = 0, detail: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.detail = detail


class ApplicationView:
    """Implements `InstancesView` (api/streams/task_views.py) and `InstancesStoresView` for the instance at `url`."""

    def __init__(
        self,
        own: OwnInstanceView,
        instances: Instances,
        settings: QueriesSettings,
        tokens: Mapping[Scope, str],
        registry: CollectorRegistry,
        why_unknown: Callable[[], str] = str,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tokens` has, by scope, the bearer token for the other instances; empty if they need none.

        `why_unknown` returns the reason why the other instances are not known, or "" if they are known.
        """
        self._why_unknown = why_unknown
        self._own = own
        self._instances = instances
        self._settings = settings
        self._tokens = tokens
        self.url = ""
        try:
            # Without `ssl_cafile`, the system's CA certificates are used.
            cafile = settings.ssl_cafile
            verify = client_tls() if cafile is None else ssl.create_default_context(cafile=cafile)
        except OSError as e:
            # ssl.SSLError is an OSError.
            raise ConfigError(f"queries.ssl_cafile: {settings.ssl_cafile}: {e.strerror or e}") from None
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
        self._client = httpx.AsyncClient(
            limits=limits, timeout=settings.timeout_ms / 1000, trust_env=False, verify=verify, transport=transport
        )
        name = "streams_instance_queries"
        text = "Requests to other instances of the application."
        self._instance_queries = counter(registry, name, text, "result")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def describe(self) -> StreamsState:
        """Return the application's state, merged from the instances that answer."""
        own = await self._own.describe()
        parts = self._partition_owners()
        others: dict[str, list[int]] = {}
        for url in self._instances.urls():
            partitions = [*parts.others.get(url, ()), *parts.restoring.get(url, ())]
            # An instance that runs no partition may have standbys. But if others have taken over all that an instance
            # has registered, it was probably killed, and a request would wait for the timeout.
            if url != self.url and (partitions or not self._instances.registration(url).running):
                others[url] = partitions
        responses, missing = await self._query_other_instances(parts._replace(others=others), "/v1/streams", {})
        found = [InstanceResponse(parts.own.union(parts.restoring.get(self.url, ())), own), *responses]
        doing = next((p.response for p in found if COMPACTION_PARTITION in p.partitions), own)
        return {
            **own,
            "tasks": merge_tasks(found),
            "standbys": merge_standbys(found),
            "compactions": doing.get("compactions", []),
            "instances": [self._describe_instance(url) for url in self._instances.urls()],
            "missing": missing_rows(missing),
        }

    async def stores(self) -> dict[str, Any]:
        """Return the state stores of the instances that answer, and the missing partitions."""
        parts = self._partition_owners()
        _check_partitions_known(parts)
        responses, missing = await self._query_other_instances(parts, "/v1/streams/stores", {})
        found = [InstanceResponse(parts.own, {"stores": self._own.stores()}), *responses]
        return {"stores": merge_stores(found), "missing": missing_rows(missing)}

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        """Return open windows of all instances that answer, at most `limit`.

        If `key` is not empty, only windows whose keys contain its text, or match it otherwise (see `KeyFilter`).
        """
        parts = self._partition_owners()
        _check_partitions_known(parts)
        pages = open_window_pages(self._own.application, store, key)
        own = self._own.windows(store, key, limit, continuation)
        wanted = {"store": store, "key": key, "limit": limit, "continuation": continuation}
        responses, missing = await self._query_other_instances(parts, "/v1/streams/windows", wanted)
        found = merge_windows([InstanceResponse(parts.own, own), *responses], limit, pages)
        return {**found, "missing": missing_rows(missing)}

    async def read_store(self, store: str, *, partial: bool, **params: Unpack[StoreQueryParams]) -> dict[str, Any]:
        parts = self._partition_owners()
        # Raises ConfigError if there is no such store, WrongContinuation if the continuation is invalid.
        own = msgspec.to_builtins(await self._own.read_store(store, **params), str_keys=True)
        if own["kind"] == GLOBAL_TABLE:
            # Each instance has a full copy of a global table.
            return {**own, "missing": []}
        _check_partitions_known(parts)
        responses, missing = await self._query_other_instances(
            parts, f"/v1/streams/stores/{quote(store, safe='')}", params
        )
        pages = row_pages(self._own.application, store, params)
        response = merge_rows([InstanceResponse(parts.own, own), *responses], missing, params["rows_max"], pages)
        if missing and not partial:
            raise Problem(INCOMPLETE, "; ".join(f"partition {p}: {why}" for p, why in sorted(missing.items())))
        return response | {"missing": missing_rows(missing)}

    async def compact(self) -> str:
        parts = self._partition_owners()
        if COMPACTION_PARTITION in parts.own:
            return self._own.compact()
        url = next((url for url, having in parts.others.items() if COMPACTION_PARTITION in having), None)
        if url is None:
            raise Problem(NOT_REACHED, parts.missing.get(COMPACTION_PARTITION, "no instance is known"))
        try:
            await self._query_instance(url, "/v1/compactions", {}, method="POST")
        except InstanceQueryFailed as e:
            if e.status == httpx.codes.CONFLICT:
                return e.detail
            raise Problem(NOT_REACHED, str(e)) from None
        return ""

    def _partition_owners(self) -> PartitionOwners:
        parts = partition_owners(self._instances, self.url, self._own.registration())
        if why := self._why_unknown():
            # The partitions that this instance restores keep their reason, since it does not depend on the others.
            elsewhere = parts.missing.keys() - parts.restoring.get(self.url, ())
            unknown = dict.fromkeys(elsewhere, f"other instances are not known: {why}")
            return parts._replace(missing=parts.missing | unknown)
        return parts

    def _describe_instance(self, url: str) -> InstanceRow:
        registration = self._instances.registration(url)
        return {
            "instance": registration.instance,
            "url": url,
            "partitions": sorted(registration.running),
            "restoring": sorted(registration.restoring),
        }

    async def _query_other_instances(
        self, parts: PartitionOwners, path: str, wanted: Mapping[str, Any]
    ) -> tuple[list[InstanceResponse], dict[int, str]]:
        """Return the responses of the others for their partitions, and the missing partitions with their reasons."""
        requested = list(parts.others.items())
        responses = await asyncio.gather(
            *(self._query_instance(url, path, wanted) for url, _ in requested), return_exceptions=True
        )
        found = []
        missing = dict(parts.missing)
        for (url, partitions), response in zip(requested, responses, strict=True):
            if isinstance(response, InstanceQueryFailed):
                missing |= dict.fromkeys(partitions, f"{url}: {response}")
            elif isinstance(response, BaseException):
                raise response
            else:
                found.append(InstanceResponse(partitions, response))
        return found, missing

    async def _query_instance(
        self, url: str, path: str, wanted: Mapping[str, Any], method: str = "GET"
    ) -> dict[str, Any]:
        """Send a request with `local=true` to one instance, and return its response, which covers that instance alone.

        Raises InstanceQueryFailed if there is no usable response.
        """
        params = encode_query_params(wanted) | {"local": "true"}
        token = self._tokens.get("read" if method == "GET" else "admin")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        limit_ms = self._settings.timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                status, body = await self._fetch_response(
                    httpx.Request(method, f"{url}{path}", params=params, headers=headers)
                )
            response = decode_json(body, dict[str, Any])
            if status >= httpx.codes.BAD_REQUEST:
                detail = str(response.get("detail", ""))
                raise InstanceQueryFailed(f"answers {status}: {detail}", status, detail)
        except TimeoutError:
            self._instance_queries.labels(result="failed").inc()
            raise InstanceQueryFailed(f"no response within {limit_ms} ms") from None
        except (httpx.HTTPError, httpx.InvalidURL, InvalidJson) as e:
            self._instance_queries.labels(result="failed").inc()
            raise InstanceQueryFailed(f"{type(e).__name__}: {e}".rstrip(": ")) from None
        except InstanceQueryFailed:
            self._instance_queries.labels(result="failed").inc()
            raise
        self._instance_queries.labels(result="answered").inc()
        return response

    async def _fetch_response(self, request: httpx.Request) -> tuple[int, bytes]:
        response = await self._client.send(request, stream=True)
        try:
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > RESPONSE_BYTES_MAX:
                    raise InstanceQueryFailed(f"a response of more than {RESPONSE_BYTES_MAX} bytes")
            return response.status_code, bytes(body)
        finally:
            await response.aclose()


class InstanceResponse(NamedTuple):
    """The response of one instance, and the partitions that it was queried for."""

    partitions: Collection[int]
    response: Mapping[str, Any]


def _check_partitions_known(parts: PartitionOwners) -> None:
    """Raise Problem while the instance starts: until it knows the source topics, it cannot name what is missing."""
    if not any(parts):
        raise Problem(INCOMPLETE, "the source topics are not known yet")


def missing_rows(missing: Mapping[int, str]) -> list[MissingPartition]:
    """Return the missing partitions as the application's responses list them."""
    return [{"partition": partition, "reason": reason} for partition, reason in sorted(missing.items())]


def merge_stores(parts: Iterable[InstanceResponse]) -> list[dict[str, Any]]:
    """Merge the instances' responses into the application's: the number of live rows of each store by partition.

    From each response only the partitions count for which the instance was queried.

    >>> of_a = InstanceResponse([0], {"stores": [{"store": "s", "rows": {"0": 2, "1": 9}, "total": 11}]})
    >>> of_b = InstanceResponse([1], {"stores": [{"store": "s", "rows": {"1": 3}, "total": 3}]})
    >>> merge_stores([of_a, of_b])
    [{'store': 's', 'rows': {'0': 2, '1': 3}, 'total': 5}]
    """
    rows: dict[str, dict[str, int]] = {}
    for partitions, response in parts:
        for store in response["stores"]:
            own = {p: n for p, n in store["rows"].items() if int(p) in partitions}
            rows.setdefault(store["store"], {}).update(own)
    ordered = {name: dict(sorted(own.items(), key=lambda row: int(row[0]))) for name, own in sorted(rows.items())}
    return [{"store": name, "rows": own, "total": sum(own.values())} for name, own in ordered.items()]


def merge_windows(
    parts: Sequence[InstanceResponse], limit: int, pages: ContinuationCodec[OpenPosition]
) -> dict[str, Any]:
    """Merge the instances' open windows into the application's, latest end first."""
    rows = [
        (OpenPosition(-row["end_ms"], row["store"], row["partition"], row["key"], row["start_ms"]), row)
        for partitions, response in parts
        for row in response["windows"]
        if row["partition"] in partitions
    ]
    ends = [position for _, response in parts if (position := pages.decode(response["continuation"]))]
    found, last = _first_merged_rows(rows, limit, ends)
    unseen = sum(response["unseen"] for _, response in parts)
    return {"windows": found, "continuation": pages.encode(last), "unseen": unseen}


def _first_merged_rows(
    rows: list[tuple[OrderT, RowT]], limit: int, ends: Sequence[OrderT]
) -> tuple[list[RowT], OrderT | None]:
    """Merge the instances' rows. Return the first `limit` rows, and the position after which the next page begins; None
    if no rows follow.

    `ends` has the position up to which each cut response is complete. Rows after the first of these positions are left
    to the next page.
    """
    # The rows that a cut response lacks may precede rows of other responses after this position.
    end = min(ends, default=None)
    known = sorted((one for one in rows if end is None or one[0] <= end), key=itemgetter(0))
    last = known[limit - 1][0] if len(known) > limit else end
    return [row for _, row in known[:limit]], last


def merge_tasks(parts: Iterable[InstanceResponse]) -> list[TaskState]:
    """Merge the instances' tasks into the application's."""
    found: list[TaskState] = [
        task for partitions, response in parts for task in response.get("tasks", ()) if task["partition"] in partitions
    ]
    return sorted(found, key=lambda task: task["partition"])


def merge_standbys(parts: Iterable[InstanceResponse]) -> list[StandbyState]:
    """Merge the instances' standbys into the application's, by partition and instance.

    >>> of_a = InstanceResponse([0], {"standbys": [{"partition": 1, "lag": 0, "instance": "a"}]})
    >>> merge_standbys([of_a, InstanceResponse([1], {})])
    [{'partition': 1, 'lag': 0, 'instance': 'a'}]
    """
    found: list[StandbyState] = [standby for _, response in parts for standby in response.get("standbys", ())]
    return sorted(found, key=lambda standby: (standby["partition"], standby["instance"]))


def merge_rows(
    parts: Sequence[InstanceResponse], missing: dict[int, str], rows_max: int, pages: ContinuationCodec[RowPosition]
) -> dict[str, Any]:
    """Merge the instances' responses for a store: their rows, at most `rows_max`, and the source offsets they reflect.

    A partition that has no source offsets in its instance's response is added to `missing`.

    >>> common = {"store": "s", "kind": "table", "key_type": "string", "continuation": None}
    >>> of_a = InstanceResponse([0], {**common, "rows": [{"partition": 0, "key": "k"}], "position": {"0": {"in": 7}}})
    >>> of_b, missing = InstanceResponse([1], {**common, "rows": [], "position": {}}), {}
    >>> merge_rows([of_a, of_b], missing, 10, ContinuationCodec(RowPosition, "s"))["position"], missing
    ({'0': {'in': 7}}, {1: 'its task has just gone'})
    """
    rows: list[tuple[tuple[int, RowOrder], Any]] = []
    source_positions: dict[str, Any] = {}
    first_response = parts[0].response
    positions: dict[tuple[int, RowOrder], RowPosition] = {}
    ends = []
    for partitions, response in parts:
        for row in response["rows"]:
            if row["partition"] in partitions:
                own = _row_position(row, first_response["key_type"])
                order = own.partition, row_order(own.key, own.start)
                positions[order] = own
                rows.append((order, row))
        if end := pages.decode(response["continuation"]):
            order = end.partition, row_order(end.key, end.start)
            positions[order] = end
            ends.append(order)
        at = {p: offsets for p, offsets in response["position"].items() if int(p) in partitions}
        missing |= {p: "its task has just gone" for p in partitions if str(p) not in at}
        source_positions |= at
    found, last = _first_merged_rows(rows, rows_max, ends)
    return {
        "store": first_response["store"],
        "kind": first_response["kind"],
        "key_type": first_response["key_type"],
        "rows": found,
        "position": dict(sorted(source_positions.items(), key=lambda each: int(each[0]))),
        "is_cut": last is not None,
        "continuation": None if last is None else pages.encode(positions[last]),
    }


def _row_position(row: Mapping[str, Any], key_type: str) -> RowPosition:
    key = base64.b64decode(row["key"]) if key_type == "bytes" else row["key"].encode()
    return RowPosition(row["partition"], key, row.get("start", 0))

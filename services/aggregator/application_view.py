"""The view of the whole application by one of its instances, which queries the others over HTTP.

The topic of instances tells which instance owns which partition. An instance is queried with `local=true`: it answers
only for itself, so requests do not loop. A request has `timeout_ms` and an answer of at most `ANSWER_BYTES_MAX`. The
partitions of an instance that does not answer are listed as missing. Requests are not retried: the client can retry.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Unpack, cast
from urllib.parse import quote

import httpx
import msgspec
from prometheus_client import CollectorRegistry

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.server import HttpServer
from penstock.api.settings import GuardedSettings, Scope
from penstock.api.streams.key_params import StoreQueryParams, query_params
from penstock.api.streams.routes import StreamsState, StreamsView
from penstock.services.aggregator.answer_merging import (
    Part,
    merge_rows,
    merge_standbys,
    merge_stores,
    merge_tasks,
    merge_windows,
    missing_rows,
)
from penstock.services.aggregator.pages import live_pages, row_pages
from penstock.services.aggregator.settings import QueriesSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.metrics import counter
from penstock.shared.streams.runtime.instances import Instances, PartitionOwners, Registration, partition_owners

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""The largest answer of one instance: ten thousand rows of some kilobytes."""
CONNECTIONS_MAX = 64
"""The most open connections to all other instances."""
RETRY_AFTER_S = 1
INCOMPLETE = ErrorKind(503, "PARTITIONS_MISSING", "Not all partitions can be read now", RETRY_AFTER_S)
NOT_REACHED = ErrorKind(503, "INSTANCE_NOT_REACHED", "The instance that does this does not answer", RETRY_AFTER_S)
COMPACTION_PARTITION = 0
GLOBAL_TABLE = "global table"


class OwnView(StreamsView, Protocol):
    """The view of this instance alone."""

    @property
    def application(self) -> str:
        """The application id of this instance."""
        ...

    def registration(self) -> Registration:
        """Return the partitions of this instance."""
        ...

    async def read_store(self, store: str, **params: Unpack[StoreQueryParams]) -> Any:
        """Like `penstock.api.streams.stores.StoresView.read_store`."""
        ...


class NotAnswered(Exception):
    """A queried instance returned no usable answer. The message has the reason, `detail` that of an error answer."""

    def __init__(self, reason: str, status: int = 0, detail: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.detail = detail


class Whole:
    """Implements `penstock.api.streams.routes.InstancesView` for the instance at `url`."""

    def __init__(
        self,
        own: OwnView,
        instances: Instances,
        settings: QueriesSettings,
        tokens: Mapping[Scope, str],
        registry: CollectorRegistry,
        why_unknown: Callable[[], str] = str,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tokens` are the bearer tokens for the other instances by scope; empty if they need none.

        `why_unknown` returns the reason if the other instances are not known, else "".
        """
        self._why_unknown = why_unknown
        self._own = own
        self._instances = instances
        self._settings = settings
        self._tokens = tokens
        self.url = ""
        try:
            verify = True if settings.ssl_cafile is None else ssl.create_default_context(cafile=settings.ssl_cafile)
        except OSError as e:  # ssl.SSLError is one
            raise ConfigError(f"queries.ssl_cafile: {settings.ssl_cafile}: {e.strerror or e}") from None
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
        self._client = httpx.AsyncClient(
            limits=limits, timeout=settings.timeout_ms / 1000, trust_env=False, verify=verify, transport=transport
        )
        name, text = "streams_instance_queries", "Requests to other instances of the application."
        self._asked = counter(registry, name, text, "result")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def describe(self) -> StreamsState:
        """Return the application's state, merged from all instances."""
        own = await self._own.describe()
        parts = self._partition_owners()
        restoring = {p for p, reason in parts.missing.items() if reason == f"being restored by {self.url}"}
        answers, missing = await self._ask_other_instances(parts, "/v1/streams", {})
        found = [Part(parts.own | restoring, cast(Mapping[str, Any], own)), *answers]
        doing = next((p.answer for p in found if COMPACTION_PARTITION in p.partitions), cast(Mapping[str, Any], own))
        state: dict[str, Any] = {
            **own,
            "tasks": merge_tasks(found),
            "standbys": merge_standbys(found),
            "compactions": doing.get("compactions", []),
            "instances": [self._describe_instance(url) for url in self._instances.urls()],
            "missing": missing_rows(missing),
        }
        return cast(StreamsState, state)

    async def stores(self) -> dict[str, Any]:
        """Return the state stores of all instances."""
        parts = self._partition_owners()
        answers, missing = await self._ask_other_instances(parts, "/v1/streams/stores", {})
        found = [Part(parts.own, {"stores": self._own.stores()}), *answers]
        return {"stores": merge_stores(found), "missing": missing_rows(missing)}

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        """Return live windows of all instances."""
        parts = self._partition_owners()
        pages = live_pages(self._own.application, store, key)
        own = cast(Mapping[str, Any], self._own.windows(store, key, limit, continuation))
        wanted = {"store": store, "key": key, "limit": limit, "continuation": continuation}
        answers, missing = await self._ask_other_instances(parts, "/v1/streams/windows", wanted)
        found = merge_windows([Part(parts.own, own), *answers], limit, pages)
        return {**found, "missing": missing_rows(missing)}

    async def read_store(self, store: str, *, partial: bool, **params: Unpack[StoreQueryParams]) -> dict[str, Any]:
        parts = self._partition_owners()
        # raises ConfigError without such a store, WrongContinuation for an invalid one
        own = msgspec.to_builtins(await self._own.read_store(store, **params), str_keys=True)
        if own["kind"] == GLOBAL_TABLE:  # each instance has a full copy
            return {**own, "missing": []}
        if not any(parts):
            raise Problem(INCOMPLETE, "the source topics are not known yet")
        answers, missing = await self._ask_other_instances(parts, f"/v1/streams/stores/{quote(store, safe='')}", params)
        pages = row_pages(self._own.application, store, params)
        answer = merge_rows([Part(parts.own, own), *answers], missing, params["rows_max"], pages)
        if missing and not partial:
            raise Problem(INCOMPLETE, "; ".join(f"partition {p}: {why}" for p, why in sorted(missing.items())))
        return answer | {"missing": missing_rows(missing)}

    async def compact(self) -> str:
        parts = self._partition_owners()
        if COMPACTION_PARTITION in parts.own:
            return self._own.compact()
        url = next((url for url, having in parts.others.items() if COMPACTION_PARTITION in having), None)
        if url is None:
            raise Problem(NOT_REACHED, parts.missing.get(COMPACTION_PARTITION, "no instance is known"))
        try:
            await self._ask_instance(url, "/v1/compactions", {}, method="POST")
        except NotAnswered as e:
            if e.status == httpx.codes.CONFLICT:
                return e.detail
            raise Problem(NOT_REACHED, str(e)) from None
        return ""

    def _partition_owners(self) -> PartitionOwners:
        parts = partition_owners(self._instances, self.url, self._own.registration())
        if why := self._why_unknown():
            return parts._replace(missing=dict.fromkeys(parts.missing, f"other instances are not known: {why}"))
        return parts

    def _describe_instance(self, url: str) -> dict[str, Any]:
        registration = self._instances.registration(url)
        return {
            "instance": registration.instance,
            "url": url,
            "partitions": sorted(registration.running),
            "restoring": sorted(registration.restoring),
        }

    async def _ask_other_instances(
        self, parts: PartitionOwners, path: str, wanted: Mapping[str, Any]
    ) -> tuple[list[Part], dict[int, str]]:
        """Return the answers of the others for their partitions, and the missing partitions with their reasons."""
        requested = list(parts.others.items())
        answers = await asyncio.gather(
            *(self._ask_instance(url, path, wanted) for url, _ in requested), return_exceptions=True
        )
        found = []
        missing = dict(parts.missing)
        for (url, partitions), answer in zip(requested, answers, strict=True):
            if isinstance(answer, NotAnswered):
                missing |= dict.fromkeys(partitions, f"{url}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(Part(partitions, answer))
        return found, missing

    async def _ask_instance(
        self, url: str, path: str, wanted: Mapping[str, Any], method: str = "GET"
    ) -> dict[str, Any]:
        """Return one instance's answer for itself. Raises NotAnswered if it has no usable one."""
        params = query_params(wanted) | {"local": "true"}
        token = self._tokens.get("read" if method == "GET" else "admin")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        limit_ms = self._settings.timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                status, body = await self._fetch_answer(
                    httpx.Request(method, f"{url}{path}", params=params, headers=headers)
                )
            answer = msgspec.json.decode(body, type=dict[str, Any])
            if status >= httpx.codes.BAD_REQUEST:
                detail = str(answer.get("detail", ""))
                raise NotAnswered(f"answers {status}: {detail}", status, detail)
        except TimeoutError:
            self._asked.labels(result="failed").inc()
            raise NotAnswered(f"no answer within {limit_ms} ms") from None
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as e:
            self._asked.labels(result="failed").inc()
            raise NotAnswered(f"{type(e).__name__}: {e}".rstrip(": ")) from None
        except NotAnswered:
            self._asked.labels(result="failed").inc()
            raise
        self._asked.labels(result="answered").inc()
        return answer

    async def _fetch_answer(self, request: httpx.Request) -> tuple[int, bytes]:
        answer = await self._client.send(request, stream=True)
        try:
            body = bytearray()
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise NotAnswered(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            return answer.status_code, bytes(body)
        finally:
            await answer.aclose()


def tokens_of(settings: GuardedSettings) -> dict[Scope, str]:
    """Return the tokens for other instances, which have the same settings: `auth_token`, or a credential's secret."""
    found: dict[Scope, str] = {}
    for credential in settings.credentials.values():
        for scope in credential.scopes:
            found.setdefault(scope, credential.secret.get_secret_value())
    if "admin" in found:
        found.setdefault("read", found["admin"])
    if settings.auth_token is not None:
        found = dict.fromkeys(("ingest", "read", "admin"), settings.auth_token.get_secret_value())
    return found


def advertised(server: HttpServer) -> str:
    """Return a server's address for other machines, as far as it is known; default: this machine's name.

    >>> from fastapi import FastAPI
    >>> from penstock.shared.common.settings import HttpSettings
    >>> advertised(HttpServer(FastAPI(), HttpSettings(host="10.0.0.7", port=8083)))
    'http://10.0.0.7:8083'
    """
    if server.host not in ("0.0.0.0", "::"):  # noqa: S104 - a name for "every address", not a binding
        return server.url
    scheme = server.url.partition(":")[0]
    return f"{scheme}://{socket.getfqdn()}:{server.port}"

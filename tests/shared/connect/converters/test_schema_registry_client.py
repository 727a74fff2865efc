"""The client of a schema registry over a real socket: users, failures and errors."""

from __future__ import annotations

import pytest

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.connect.converters import schema_registry_client
from penstock.shared.connect.converters.schema_registry_client import RegistryAccess, RegistryClient
from tests.shared.connect.converters.registry_server import schema_registry

DOWN = (503, {}, b"busy")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_registry_client, "BACKOFF", ExponentialBackoff(0, 0))


async def test_requests_are_authenticated() -> None:
    """Requests contain the user and password of the settings or the URL; without them the registry answers 401."""
    async with schema_registry("ann:s3cret") as server:
        with_user = RegistryClient(RegistryAccess((server.url,), user="ann:s3cret"))
        assert await with_user.register("a/b", "AVRO", '"int"') == 1
        assert server.requested == ["POST /subjects/a%2Fb/versions"]
        in_url = RegistryClient(RegistryAccess((server.url.replace("//", "//ann:s3cret@"),)))
        assert (await in_url.by_id(1)).text == '"int"'
        with pytest.raises(DataError, match="Unauthorized"):
            await RegistryClient(RegistryAccess((server.url,))).by_id(1)
        assert "s3cret" not in repr(RegistryAccess((), user="ann:s3cret"))


async def test_retriable_failures_are_retried() -> None:
    """A failed request is retried with other addresses; a persistent failure is a RetriableError."""
    async with schema_registry() as server:
        id = server.add("t-value", "int")
        client = RegistryClient(RegistryAccess(("http://127.0.0.1:9", server.url)))
        server.failing += [DOWN]
        assert (await client.by_id(id)).text == '"int"'
        server.failing += [DOWN] * 3
        with pytest.raises(RetriableError, match="503: busy"):
            await client.by_id(id)
    with pytest.raises(RetriableError, match="ConnectError"):
        await client.by_id(id)


async def test_errors_have_the_registrys_message() -> None:
    """An error of the registry is a DataError with its message and is not retried."""
    async with schema_registry() as server:
        with pytest.raises(DataError, match="Invalid schema; error code: 42201"):
            await RegistryClient(RegistryAccess((server.url,))).register("t", "AVRO", '{"type": "nonsense"}')
        assert len(server.requested) == 1
        server.failing.append((404, {}, b"<html>"))
        with pytest.raises(DataError, match="404 <html>"):
            await RegistryClient(RegistryAccess((server.url,))).by_id(1)
        server.failing.append((200, {}, b"[" * 100_000))
        with pytest.raises(DataError, match="200 "):
            await RegistryClient(RegistryAccess((server.url,))).by_id(1)

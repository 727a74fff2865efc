"""Schemas in a registry: subject names, a converter's requests, and the client over a real socket with its failures."""

from __future__ import annotations

import gzip
import ssl
from pathlib import Path

import pytest

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.common.http_tls import client_tls
from penstock.shared.connect.converters import schema_registry_client
from penstock.shared.connect.converters.schema_registry_client import RegistryAccess, RegistryClient
from penstock.shared.connect.converters.schema_registry_serde import (
    SchemaRegistrySerde,
    parse_registered_schema,
    subject_of,
)
from penstock.shared.connect.errors import MoreNeeded
from tests.integration.certificates import Authority
from tests.shared.connect.converters.converting import fetching
from tests.shared.connect.converters.registry_server import SchemaRegistry, schema_registry

INT = '"int"'

DOWN = (503, {}, b"busy")


def registry_of(server: SchemaRegistry, **settings: str) -> SchemaRegistrySerde:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    return SchemaRegistrySerde.of({"schema.registry.url": server.url, **given, "of.another": "x"}, "AVRO", is_key=False)


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        ("TopicNameStrategy", "t-value"),
        ("io.confluent.kafka.serializers.subject.RecordNameStrategy", "a.R"),
        ("TopicRecordNameStrategy", "t-a.R"),
    ],
)
async def test_subjects_are_named_by_the_strategy(strategy: str, subject: str) -> None:
    """A schema is registered under the strategy's subject; strategies with the record's name require one."""
    async with schema_registry() as server:
        registry = registry_of(server, value_subject_name_strategy=strategy)
        assert await fetching(lambda: registry.to_write("t", INT, "a.R")) == (1, None)
        assert server.subjects == {subject: [1]}
    if "Record" in strategy:
        with pytest.raises(DataError, match="schema with a name"):
            subject_of(strategy, "t", None, is_key=False)


async def test_clients_read_the_ca_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of all clients have one TLS context."""
    client_tls.cache_clear()
    made, make = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **more: made.append(1) or make(**more))
    async with schema_registry() as server:
        for version in ('"int"', '"long"'):
            await RegistryClient(RegistryAccess((server.url,))).register("t", "AVRO", version)
    assert made == [1]


def test_clients_trust_the_systems_authorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSL_CERT_FILE replaces the system's CA certificates."""
    monkeypatch.setenv("SSL_CERT_FILE", str(Authority(tmp_path, "authority").cafile))
    client_tls.cache_clear()
    (trusted,) = client_tls().get_ca_certs()
    client_tls.cache_clear()
    assert (("commonName", "authority"),) in trusted["subject"]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_schema_that_is_not_json_is_an_error(text: str) -> None:
    """A registered schema, or one that it refers to, must be JSON that is not nested too deeply."""
    with pytest.raises(DataError, match="not JSON"):
        parse_registered_schema(text)


def test_a_schema_may_have_a_lone_surrogate() -> None:
    """A pattern of a registered schema may escape half of a surrogate pair."""
    assert parse_registered_schema(r'{"pattern": "\ud800"}') == {"pattern": "\ud800"}


async def test_without_auto_registration_the_schema_must_exist() -> None:
    """Without `auto.register.schemas` the schema must exist in the subject, and none is added."""
    async with schema_registry() as server:
        registry = registry_of(server, auto_register_schemas="false")
        with pytest.raises(DataError, match="Subject 't-value' not found"):
            await fetching(lambda: registry.to_write("t", INT, None))
        id = server.add("t-value", "int")
        assert await fetching(lambda: registry.to_write("t", INT, None)) == (id, None)
        with pytest.raises(DataError, match="error code: 40403"):
            await fetching(lambda: registry.to_write("t", '"long"', None))


async def test_schemas_of_another_type_are_an_error() -> None:
    """A schema of another type than the converter's and an unknown id are DataErrors."""
    async with schema_registry() as server:
        registry = registry_of(server)
        id = server.add("t-value", {"type": "string"}, "JSON")
        with pytest.raises(DataError, match="JSON, not AVRO"):
            await fetching(lambda: registry.schema(id))
        with pytest.raises(DataError, match="Schema not found"):
            await fetching(lambda: registry.schema(99))


async def test_the_cache_is_bounded() -> None:
    """The oldest schema is evicted from the cache and fetched again."""
    async with schema_registry() as server:
        registry = registry_of(server, schemas_cache_size="2")
        for kind in ("int", "long", "string"):
            server.add("t-value", kind)
        for id in (1, 2, 3):
            await fetching(lambda id=id: registry.schema(id))  # type: ignore[misc]
        assert registry.schema(3).text == '"string"'
        with pytest.raises(MoreNeeded):
            registry.schema(1)


async def test_the_cache_of_latest_schemas_is_bounded() -> None:
    """With `use.latest.version`, the oldest subject's schema is evicted from the cache and fetched again."""
    async with schema_registry() as server:
        settings = {"auto_register_schemas": "false", "value_subject_name_strategy": "RecordNameStrategy"}
        registry = registry_of(server, use_latest_version="true", schemas_cache_size="2", **settings)
        for name in ("a", "b", "c"):
            server.add(name, "int")
            await fetching(lambda name=name: registry.to_write("t", INT, name))  # type: ignore[misc]
        for name in ("b", "c"):
            registry.to_write("t", INT, name)
        with pytest.raises(MoreNeeded):
            registry.to_write("t", INT, "a")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_registry_client, "BACKOFF", ExponentialBackoff(0, 0))


@pytest.mark.parametrize("user", ["ann:s3cret", ":s3cret"])
async def test_requests_are_authenticated(user: str) -> None:
    """Requests contain the user and password of the settings or the URL; without them the registry answers 401."""
    async with schema_registry(user) as server:
        with_user = RegistryClient(RegistryAccess((server.url,), user=user))
        assert await with_user.register("a/b", "AVRO", '"int"') == 1
        assert server.requested == ["POST /subjects/a%2Fb/versions"]
        in_url = RegistryClient(RegistryAccess((server.url.replace("//", f"//{user}@"),)))
        assert (await in_url.by_id(1)).text == '"int"'
        with pytest.raises(DataError, match="Unauthorized"):
            await RegistryClient(RegistryAccess((server.url,))).by_id(1)
        assert "s3cret" not in repr(RegistryAccess((), user="ann:s3cret"))


async def test_retriable_failures_are_retried() -> None:
    """A failed request is retried with other addresses; a persistent failure is a RetriableError."""
    async with schema_registry() as server:
        id = server.add("t-value", "int")
        client = RegistryClient(RegistryAccess(("http://127.0.0.1:9", server.url)))
        server.failing += [DOWN, (503, {"Content-Encoding": "deflate"}, b"busy")]
        assert (await client.by_id(id)).text == '"int"'
        server.failing += [DOWN] * 3
        with pytest.raises(RetriableError, match="503: busy"):
            await client.by_id(id)
    with pytest.raises(RetriableError, match="ConnectError"):
        await client.by_id(id)


async def test_a_larger_response_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response with more than the limit after decompression is a DataError and is not retried."""
    monkeypatch.setattr(schema_registry_client, "RESPONSE_BYTES_MAX", 100)
    async with schema_registry() as server:
        server.failing.append((200, {"Content-Encoding": "gzip"}, gzip.compress(b" " * 200)))
        with pytest.raises(DataError, match=r"GET /schemas/ids/1 .* more than 100 bytes"):
            await RegistryClient(RegistryAccess((server.url,))).by_id(1)
        assert len(server.requested) == 1


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

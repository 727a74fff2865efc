"""A service's connection to Kafka, which may be unreachable or reject the service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from structlog.testing import capture_logs

from penstock.api.http.app import create_health_app
from penstock.api.http.server import HttpServer
from penstock.services.first_connection import first_connection
from penstock.services.kafka_daemon import KafkaHttpDaemon
from penstock.shared.common.errors import (
    AuthenticationFailed,
    BrokerNotAvailable,
    ConfigError,
    KafkaTimeout,
    PenstockError,
)
from penstock.shared.common.settings import HttpSettings, KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


class Service(KafkaHttpDaemon):
    """Serves its health; `tried` is set after an attempt to connect."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__(kafka)
        self.server = HttpServer(create_health_app("test", {"kafka": self._probe}, CollectorRegistry()), HttpSettings())
        self.tried = asyncio.Event()

    async def connect(self) -> None:
        try:
            await super().connect()
        finally:
            self.tried.set()

    async def close(self) -> None:
        await self.server.stop(0)


async def test_http_answers_while_kafka_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/health` is a 503 with the reason while Kafka is unreachable, and the service keeps trying."""
    monkeypatch.setattr("penstock.services.first_connection.RETRY_MS", 0)
    service = Service(KafkaSettings(bootstrap_servers="127.0.0.1:1", request_timeout_ms=50))
    await service.startup()
    working = asyncio.create_task(service.main_loop())
    try:
        async with httpx.AsyncClient(base_url=service.server.url, trust_env=False) as http:
            for _ in range(2):
                await service.tried.wait()
                service.tried.clear()
            response = await http.get("/health")
        kafka = response.json()["checks"]["kafka"]
        assert (response.status_code, kafka["status"]) == (503, "failing")
        assert "127.0.0.1:1: no broker reached" in kafka["detail"]
        assert not working.done()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await service.close()


async def test_an_admin_call_of_a_service_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once Kafka cannot be reached, a route is answered before its client gives up."""
    monkeypatch.setattr("penstock.services.kafka_daemon.ADMIN_TIMEOUT_MS", 50)
    async with FakeCluster() as cluster:
        service = Service(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await service.connect()
    with pytest.raises(KafkaTimeout, match="50 ms"):
        await service._admin.list_topics()
    await service._admin.close()


async def test_an_authentication_error_ends_the_service() -> None:
    """A rejected password ends the service instead of a retry."""
    async with FakeCluster(users={"ali": "right"}) as cluster:
        kafka = KafkaSettings(
            bootstrap_servers=cluster.bootstrap_servers,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_username="ali",
            sasl_password=SecretStr("wrong"),
        )
        service = Service(kafka)
        await service.startup()
        try:
            with pytest.raises(ExceptionGroup) as raised:
                await service.main_loop()
            (error,) = raised.value.exceptions
            assert isinstance(error, AuthenticationFailed)
        finally:
            await service.close()


def test_a_missing_certificate(tmp_path: Path) -> None:
    """A missing certificate is a ConfigError before the service listens."""
    with pytest.raises(ConfigError, match=r"kafka\.ssl_cafile: .*no\.pem"):
        Service(KafkaSettings(security_protocol="SSL", ssl_cafile=tmp_path / "no.pem"))


async def test_the_first_connection_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retriable errors are retried. A reason is logged again only after another one."""
    monkeypatch.setattr("penstock.services.first_connection.RETRY_MS", 0)
    failures = [BrokerNotAvailable(reason) for reason in ("a", "a", "b", "b", "a")]

    async def connect() -> str:
        if failures:
            raise failures.pop(0)
        return "connected"

    with capture_logs() as logged:
        assert await first_connection(connect) == "connected"
    assert [line["reason"] for line in logged] == ["a", "b", "a"]


async def test_a_rejected_login_is_not_retried() -> None:
    """An error that a retry cannot fix is raised after the first attempt, and not logged."""
    failures: list[PenstockError] = [AuthenticationFailed("wrong password")]

    async def connect() -> None:
        raise failures.pop()

    with capture_logs() as logged, pytest.raises(AuthenticationFailed):
        await first_connection(connect)
    assert logged == []

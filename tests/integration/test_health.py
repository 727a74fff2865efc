"""`/health` of services whose broker hangs, and the errors that services report at startup."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from penstock.services.admin.daemon import AdminDaemon
from penstock.services.admin.settings import AdminServiceSettings
from penstock.services.aggregator.main import Aggregator
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.cli import app
from penstock.services.consumer.daemon import ConsumerDaemon
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.local.stack import Service, ServiceSpec, Stack
from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.services.service_lifecycle import Daemon
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common.settings import DaemonSettings, KafkaSettings
from tests.http_client import http_client
from tests.shared_broker import Broker

SILENCE_MAX_MS = 1_500
WAIT_S = 90


async def health(http: httpx.AsyncClient, service: Service) -> tuple[int, dict[str, Any]]:
    response = await http.get(f"{service.url}/health")
    return response.status_code, response.json()["checks"]


async def until(http: httpx.AsyncClient, service: Service, status: int) -> dict[str, Any]:
    """The checks of the first response with that status."""
    async with asyncio.timeout(WAIT_S):
        while (got := await health(http, service))[0] != status:  # noqa: ASYNC110 - another process is polled
            await asyncio.sleep(0.1)
    return got[1]


async def test_a_broker_that_hangs_is_unhealthy_until_it_answers_again(own_kafka: EmbeddedKafka, stack: Stack) -> None:
    """While the broker is stopped with SIGSTOP, aggregator and consumer return 503 with the silence limit, and 200
    after SIGCONT. The gateway's health contains each of them.
    """
    address = {"KAFKA__BOOTSTRAP_SERVERS": own_kafka.bootstrap_servers}
    quick = address | {"KAFKA_SILENCE_MAX_MS": str(SILENCE_MAX_MS)}
    async with Admin(KafkaSettings(bootstrap_servers=own_kafka.bootstrap_servers)) as admin:
        await admin.create_topics([event_time_topic(name, 2) for name in ("events", "sessions")])
    aggregator = await stack.start(
        ServiceSpec("aggregator", quick | {"TOPOLOGY": "penstock.services.local.topologies:sessions"})
    )
    consumer = await stack.start(
        ServiceSpec(
            "consumer",
            quick
            | {"TOPICS": "sessions", "HANDLER": "penstock.services.local.log_handler:log_record", "GROUP_ID": "g"},
        )
    )
    others = json.dumps({service.name: service.url for service in (aggregator, consumer)})
    gateway = await stack.start(
        ServiceSpec("gateway", address | {"GATEWAY_SERVICES": others}, module="penstock.services.local.gateway")
    )
    async with http_client(timeout=10) as http:
        await asyncio.gather(*(service.healthy() for service in (aggregator, consumer, gateway)))
        await asyncio.sleep(SILENCE_MAX_MS / 1000)  # an idle service is healthy
        for service in (aggregator, consumer, gateway):
            assert (await health(http, service))[0] == 200
        own_kafka.pause()
        try:
            for service in (aggregator, consumer):
                check = (await until(http, service, 503))["kafka"]
                assert "no response from any broker for" in check["detail"]
                assert f"kafka_silence_max_ms={SILENCE_MAX_MS}" in check["detail"]
            checks = await until(http, gateway, 503)
            assert checks.keys() == {"kafka", "aggregator", "consumer"}
            assert "kafka: no response from any broker" in checks["consumer"]["detail"]
        finally:
            own_kafka.resume()
        await asyncio.gather(*(until(http, service, 200) for service in (aggregator, consumer, gateway)))
        await consumer.kill()
        checks = await until(http, gateway, 503)
        assert (checks["aggregator"]["status"], checks["consumer"]["status"]) == ("ok", "failing")
        assert consumer.url in checks["consumer"]["detail"]


SERVICES = {
    "producer": [],
    "consumer": ["--topics=t", "--group-id=g", "--handler=penstock.services.local.log_handler:log_record"],
    "aggregator": ["--topology=penstock.services.local.topologies:sessions"],
    "admin": [],
}


def ended(name: str, *arguments: str) -> tuple[int, list[str]]:
    """The exit status and standard error of a service that exits without a signal."""
    ran = CliRunner().invoke(
        app, [name, *SERVICES[name], *arguments, "--log.level=error"], env={"PENSTOCK_CONFIG": os.devnull}
    )
    return ran.exit_code, ran.stderr.splitlines()


@pytest.mark.parametrize("name", SERVICES)
def test_a_port_in_use(name: str) -> None:
    """A port in use ends each service with status 2 and one line that names the setting and the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, lines = ended(name, f"--http.port={port}")
    assert (status, len(lines)) == (2, 1), lines
    assert f"http.port: port {port}" in lines[0]


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_certificate(name: str) -> None:
    """A missing certificate ends each service with status 2 and one line that names the setting and the path."""
    status, lines = ended(name, "--http.port=0", "--kafka.security-protocol=SSL", "--kafka.ssl-cafile=no.pem")
    assert (status, len(lines)) == (2, 1), lines
    assert "kafka.ssl_cafile: no.pem" in lines[0]


COMMANDS = {
    "sessions": ["sessions", "--application=app"],
    "doctor": ["doctor"],
    "reset": ["streams", "reset"],
    "restore-offsets": ["streams", "restore-offsets"],
    "dlq": ["dlq", "list", "t"],
}


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=COMMANDS)
def test_a_command_logs_an_unreachable_kafka_early(number: int) -> None:
    """Every command logs a warning with the address that it cannot reach, and fails later."""
    server = f"127.0.0.1:{number + 1}"  # not one for all, since a process repeats the warning only after a while
    env = {
        "PENSTOCK_CONFIG": os.devnull, "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": server,
        "PENSTOCK_KAFKA__REQUEST_TIMEOUT_MS": "3000",
    }  # fmt: skip
    ran = CliRunner().invoke(app, [*COMMANDS.values()][number], env=env)
    assert ran.exit_code == 1, ran.output
    first = ran.stderr.splitlines()[0]
    assert ('"level": "warning"' in first, server in first) == (True, True), ran.stderr


DAEMONS: dict[str, tuple[type[DaemonSettings], Callable[[Any], Daemon]]] = {
    "producer": (ProducerServiceSettings, ProducerDaemon),
    "consumer": (ConsumerServiceSettings, ConsumerDaemon),
    "aggregator": (AggregatorSettings, Aggregator),
    "admin": (AdminServiceSettings, AdminDaemon),
}


@pytest.mark.parametrize("number", range(len(DAEMONS)), ids=DAEMONS)
async def test_an_unreachable_kafka_is_logged_early(number: int) -> None:
    """Every service logs a warning with the address that it cannot reach, and keeps trying."""
    name, (settings_class, make) = [*DAEMONS.items()][number]
    server = f"127.0.0.1:{len(COMMANDS) + number + 1}"  # as above, each has its own
    given = (f"--kafka.bootstrap-servers={server}", "--kafka.request-timeout-ms=20000", "--http.port=0")
    settings = settings_class.load([*SERVICES[name], *given], environ={"PENSTOCK_CONFIG": os.devnull}, program=name)
    with capture_logs() as logged:
        daemon = make(settings)

        async def work() -> None:
            await daemon.startup()
            await daemon.main_loop()

        try:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
                working = group.create_task(work())
                while not (lines := [line for line in logged if server in str(line)]):  # noqa: ASYNC110 - it is a list
                    await asyncio.sleep(0.05)
                assert not working.done()
                working.cancel()
            assert lines[0]["log_level"] == "warning"
        finally:
            await daemon.shutdown()


async def test_a_consumer_waits_for_a_missing_topic(kafka: Broker, stack: Stack, topic_name: str) -> None:
    """A consumer waits for a missing topic; `/health` names the topic, and is healthy once the topic exists."""
    settings = {
        "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "TOPICS": topic_name, "GROUP_ID": topic_name,
        "HANDLER": "penstock.services.local.log_handler:log_record",
    }  # fmt: skip
    consumer = await stack.start(ServiceSpec("consumer", settings))
    async with http_client(timeout=10, transport=httpx.AsyncHTTPTransport(retries=10)) as http:
        async with asyncio.timeout(WAIT_S):
            while topic_name not in (await health(http, consumer))[1]["progress"]["detail"]:  # noqa: ASYNC110 - it is polled
                await asyncio.sleep(0.1)
        assert not consumer.ended
        async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
            await admin.create_topics([event_time_topic(topic_name, 1)])
        await until(http, consumer, 200)


def test_a_missing_topic_ends_the_aggregator(kafka: Broker, topic_name: str) -> None:
    """An aggregator ends with status 1 and one line that names the missing topic and the time limit."""
    status, lines = ended(
        "aggregator",
        f"--kafka.bootstrap-servers={kafka.bootstrap_servers}",
        "--http.port=0",
        f'--topology-options={{"topic": "{topic_name}"}}',
        "--streams.topic-wait-ms=500",
    )
    assert (status, len(lines)) == (1, 1), lines
    assert f"no topic {topic_name} after 500 ms" in lines[0]


def test_a_kafka_that_cannot_be_reached_ends_the_aggregator() -> None:
    """An aggregator that cannot reach Kafka ends with status 1 and one line that names the address."""
    given = ("--kafka.bootstrap-servers=127.0.0.1:1", "--kafka.request-timeout-ms=500", "--http.port=0")
    status, lines = ended("aggregator", *given)
    assert (status, len(lines)) == (1, 1), lines
    assert "127.0.0.1:1: no broker" in lines[0]

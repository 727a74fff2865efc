"""TLS, client certificates and each SASL mechanism on a real broker, and the errors of rejected connections."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiokafka.protocol.types import CompactArray, CompactBytes, Int8, Int16, Int32
from anyio.from_thread import start_blocking_portal

from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.protocol.requests import TAGS, TEXT_FLEX, ApiVersion
from penstock.shared.common.errors import AuthenticationFailed, BrokerNotAvailable, PenstockError
from penstock.shared.common.records import ProducerRecord, RecordMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.integration.certificates import Authority

PASSWORD = "open-sesame-5871"
WRONG = "shut-sesame-9034"
KEY_PASSWORD = "under-the-mat-2210"
TOKENS = "penstock_test_oauth"
QUICK_MS = 3_000
"""A rejected connection ends within this time, long before `request_timeout_ms`, on a busy machine too."""

SCRAM = {"SCRAM-SHA-256": (1, "sha256"), "SCRAM-SHA-512": (2, "sha512")}
ITERATIONS = 4096
ALTER_USER_SCRAM_CREDENTIALS = ApiVersion(
    "AlterUserScramCredentials",
    51,
    0,
    (
        ("deletions", CompactArray(("name", TEXT_FLEX), ("mechanism", Int8), TAGS)),
        (
            "upsertions",
            CompactArray(
                ("name", TEXT_FLEX),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted_password", CompactBytes),
                TAGS,
            ),
        ),
    ),
    (
        ("throttle_time_ms", Int32),
        ("results", CompactArray(("user", TEXT_FLEX), ("error_code", Int16), ("error_message", TEXT_FLEX), TAGS)),
    ),
    flexible=True,
)

given_tokens: list[str] = []


def _token(lifetime_s: float) -> str:
    """An unsecured JSON web token, which Kafka's validator for development accepts."""
    now = time.time()
    parts = {"alg": "none"}, {"sub": "ali", "iat": now - 10, "exp": now + lifetime_s}
    given_tokens.append(
        ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts) + "."
    )
    return given_tokens[-1]


async def good_token() -> str:
    return _token(3600)


def short_token() -> str:
    return _token(1.5)


def expired_token() -> str:
    return _token(-5)


class Secured(NamedTuple):
    """A broker with a listener for each security protocol, and the certificates to connect to it."""

    kafka: EmbeddedKafka
    cafile: Path
    other_cafile: Path
    certfile: Path
    other_certfile: Path

    def settings(self, listener: str, **more: Any) -> KafkaSettings:
        """Settings for a listener: its security protocol, and the certificate authority if it uses TLS."""
        protocol = LISTENERS.get(listener, "PLAINTEXT")
        given = {"bootstrap_servers": self.kafka.address(listener), "security_protocol": protocol}
        if protocol.endswith("SSL"):
            given["ssl_cafile"] = self.cafile
        return KafkaSettings.model_validate(given | more)


LISTENERS = {"TLS": "SASL_SSL", "MUTUAL": "SSL", "BARE": "SASL_PLAINTEXT"}


def broker_settings(folder: Path, authority: Authority) -> EmbeddedKafkaSettings:
    security = "org.apache.kafka.common.security"
    plain_users = f"required user_ali='{PASSWORD}';"
    properties = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.issue("broker")),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.cafile),
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.tls.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.bare.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.tls.plain.sasl.jaas.config": f"{security}.plain.PlainLoginModule {plain_users}",
        "listener.name.tls.oauthbearer.sasl.jaas.config": f"{security}.oauthbearer.OAuthBearerLoginModule required;",
    }
    for listener in ("tls", "bare"):
        for mechanism in SCRAM:
            name = f"listener.name.{listener}.{mechanism.lower()}.sasl.jaas.config"
            properties[name] = f"{security}.scram.ScramLoginModule required;"
    return EmbeddedKafkaSettings(listeners=LISTENERS, properties=properties, jvm_options=QUICK_START)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, formatted: Path) -> Iterator[Secured]:
    """One broker for this file."""
    folder = tmp_path_factory.mktemp("secured")
    authority, other = Authority(folder, "authority"), Authority(folder, "another")
    shutil.copytree(formatted, folder / "kafka")
    broker = EmbeddedKafka(folder / "kafka", broker_settings(folder, authority))
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(broker):
        portal.call(set_password, broker, "ali", PASSWORD)
        yield Secured(
            broker,
            authority.cafile,
            other.cafile,
            authority.issue("client", KEY_PASSWORD),
            other.issue("stranger", KEY_PASSWORD),
        )


@pytest.fixture(autouse=True)
def _tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable under a name that a setting can contain."""
    given_tokens.clear()
    monkeypatch.setitem(sys.modules, TOKENS, sys.modules[__name__])


async def set_password(kafka: EmbeddedKafka, user: str, password: str | None) -> None:
    """Set a user's SCRAM credentials; None deletes them."""
    connection = Connection(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    await connection.open()
    for number, name in SCRAM.values():
        deletions, upsertions = [], []
        if password is None:
            deletions.append((user, number, {}))
        else:
            salted = hashlib.pbkdf2_hmac(name, password.encode(), b"salt-and-pepper", ITERATIONS)
            upsertions.append((user, number, ITERATIONS, b"salt-and-pepper", salted, {}))
        request = ALTER_USER_SCRAM_CREDENTIALS(deletions, upsertions)
        response = await connection.send(connection.any_node(), request, "credentials")
        assert [result[1] for result in response.results] == [0]
    await connection.close()


def credentials(mechanism: str, password: str = PASSWORD, user: str = "ali") -> dict[str, str]:
    return {"sasl_mechanism": mechanism, "sasl_username": user, "sasl_password": password}


def tokens(function: str) -> dict[str, str]:
    return {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": f"{TOKENS}:{function}"}


def certificate(file: Path) -> dict[str, object]:
    return {"ssl_certfile": file, "ssl_key_password": KEY_PASSWORD}


WAYS_IN = {
    "tls-plain": ("TLS", credentials("PLAIN")),
    "tls-scram-256": ("TLS", credentials("SCRAM-SHA-256")),
    "tls-scram-512": ("TLS", credentials("SCRAM-SHA-512")),
    "tls-oauthbearer": ("TLS", tokens("good_token")),
    "bare-scram-512": ("BARE", credentials("SCRAM-SHA-512")),
}


async def written_and_read(settings: KafkaSettings, topic: str) -> list[bytes | None]:
    """Create a topic, send a record and read it in a consumer group, all with `settings`; return the values read."""
    async with Admin(settings) as admin:
        await admin.create_topics([NewTopic(topic, 1)])
    async with Producer(settings) as producer:
        await (await producer.send(topic, b"v"))
    found: list[bytes | None] = []
    async with Consumer(settings, ConsumerSettings(group_id=topic, auto_offset_reset="earliest")) as consumer:
        consumer.subscribe([topic])
        async with asyncio.timeout(20):
            while not found:
                for columns in (await consumer.poll(200)).values():
                    found += columns.values
    return found


@pytest.mark.parametrize("way", WAYS_IN)
async def test_each_mechanism_connects(
    secured: Secured, topic_name: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Admin, producer and consumer connect with each mechanism, and the log at DEBUG contains no secret."""
    listener, more = WAYS_IN[way]
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="aiokafka")  # a service's logging, configured before, silences it
    assert await written_and_read(secured.settings(listener, **more), topic_name) == [b"v"]
    assert "api='SaslAuthenticate'" in caplog.text
    assert_no_secret(caplog.text)


async def test_a_client_certificate(secured: Secured, topic_name: str) -> None:
    """Admin, producer and consumer connect with a client certificate whose key has a password."""
    settings = secured.settings("MUTUAL", **certificate(secured.certfile))
    assert await written_and_read(settings, topic_name) == [b"v"]


def assert_no_secret(text: str) -> None:
    secrets = [PASSWORD, WRONG, KEY_PASSWORD, *given_tokens]
    secrets += [base64.b64encode(secret.encode()).decode() for secret in secrets]
    assert not [secret for secret in secrets if secret in text]


@asynccontextmanager
async def consumer_of(settings: KafkaSettings) -> AsyncIterator[None]:
    async with Consumer(settings, ConsumerSettings(group_id="g")) as consumer:
        consumer.subscribe(["t"])
        yield


async def connection_errors(settings: KafkaSettings) -> list[PenstockError]:
    """The errors of a producer, a consumer and an admin that cannot connect.

    Each names the address and contains no secret.
    """
    found = []
    for client in (Producer(settings), consumer_of(settings), Admin(settings)):
        started = time.monotonic()
        with pytest.raises(PenstockError, match=settings.bootstrap_servers) as caught:
            async with client:
                pass
        assert time.monotonic() - started < QUICK_MS / 1000
        assert_no_secret(f"{caught.value!r} {caught.value} {caught.getrepr(chain=True)}")
        found.append(caught.value)
    return found


FAILED_LOGINS = {
    "plain": (credentials("PLAIN", WRONG), "SASL_AUTHENTICATION_FAILED: .*Invalid username or password"),
    "scram": (credentials("SCRAM-SHA-256", WRONG), "SASL_AUTHENTICATION_FAILED: .*invalid credentials"),
    "unknown-user": (credentials("SCRAM-SHA-512", PASSWORD, "baba"), "SASL_AUTHENTICATION_FAILED"),
    "expired-token": (tokens("expired_token"), "SASL_AUTHENTICATION_FAILED: .*invalid_token"),
}


@pytest.mark.parametrize("case", FAILED_LOGINS)
async def test_wrong_credentials(secured: Secured, case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong credentials raise AuthenticationFailed with the broker's reason, and are not retried."""
    more, reason = FAILED_LOGINS[case]
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="aiokafka")  # a service's logging, configured before, silences it
    for error in await connection_errors(secured.settings("TLS", **more)):
        assert isinstance(error, AuthenticationFailed)
        error.add_note("as the broker says")
        with pytest.raises(AuthenticationFailed, match=reason):
            raise error
    assert caplog.text.count("api='SaslHandShake'") == 3
    assert_no_secret(caplog.text)


async def test_an_unsupported_mechanism(secured: Secured) -> None:
    """A mechanism that the listener does not enable raises AuthenticationFailed with UNSUPPORTED_SASL_MECHANISM."""
    for error in await connection_errors(secured.settings("BARE", **credentials("PLAIN"))):
        assert isinstance(error, AuthenticationFailed)
        assert "UNSUPPORTED_SASL_MECHANISM" in str(error)


async def test_an_untrusted_broker_certificate(secured: Secured) -> None:
    """A broker certificate of another authority raises AuthenticationFailed before credentials are sent."""
    settings = secured.settings("TLS", **credentials("PLAIN"), ssl_cafile=secured.other_cafile)
    for error in await connection_errors(settings):
        assert isinstance(error, AuthenticationFailed)
        assert "the broker's certificate cannot be verified: " in str(error)


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "of another authority"])
async def test_a_missing_or_untrusted_client_certificate(secured: Secured, missing: bool) -> None:
    """A missing or untrusted client certificate raises AuthenticationFailed with the TLS alert and the setting's
    name.
    """
    more = {} if missing else certificate(secured.other_certfile)
    for error in await connection_errors(secured.settings("MUTUAL", **more)):
        assert isinstance(error, AuthenticationFailed)
        assert "TLS: " in str(error)
        assert "kafka.ssl_certfile" in str(error)


@pytest.mark.parametrize(
    ("listener", "protocol"),
    [("TLS", "PLAINTEXT"), ("MUTUAL", "PLAINTEXT"), ("BARE", "PLAINTEXT"), ("PLAINTEXT", "SSL")],
)
async def test_the_wrong_security_protocol(secured: Secured, listener: str, protocol: str) -> None:
    """A client with another protocol than the listener's fails within the deadline, and the error names the setting."""
    settings = secured.settings(listener, security_protocol=protocol, request_timeout_ms=600)
    with pytest.raises(BrokerNotAvailable, match=settings.bootstrap_servers) as caught:
        async with Producer(settings):
            pass
    assert f"kafka.security_protocol={protocol}" in str(caught.value)


async def test_deleted_credentials(secured: Secured, topic_name: str) -> None:
    """Deleted credentials end no open connection, but once it is idle and reopened, calls and polls raise
    AuthenticationFailed.
    """
    await set_password(secured.kafka, "baba", PASSWORD)
    more = {**credentials("SCRAM-SHA-256", PASSWORD, "baba"), "connections_max_idle_ms": 300}
    settings = secured.settings("TLS", **more)
    async with Admin(settings) as admin, Consumer(settings, ConsumerSettings(fetch_max_wait_ms=100)) as consumer:
        await admin.create_topics([NewTopic(topic_name, 1)])
        consumer.assign([TopicPartition(topic_name, 0)])
        await consumer.poll(200)
        await set_password(secured.kafka, "baba", None)
        consumer.pause(TopicPartition(topic_name, 0))
        for connection in (admin._connection, consumer._connection):
            (node,) = connection.nodes()
            async with asyncio.timeout(5):
                while connection.connected(node):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.05)
        consumer.resume(TopicPartition(topic_name, 0))

        async def poll() -> None:
            while True:
                await consumer.poll(100)

        for call in (admin.describe_topics([topic_name]), admin.group_offsets(topic_name), poll()):
            with pytest.raises(AuthenticationFailed, match=secured.kafka.address("TLS")) as caught:
                async with asyncio.timeout(10):
                    await call
            assert_no_secret(f"{caught.value!r} {caught.getrepr(chain=True)}")


async def test_tokens_that_expire(secured: Secured, topic_name: str) -> None:
    """The broker closes a connection whose token has expired; the client fetches a new token, and no record is lost or
    repeated.
    """
    settings = secured.settings("TLS", **tokens("short_token"))
    async with Admin(secured.settings("PLAINTEXT")) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
        async with Producer(settings, ProducerSettings(linger_ms=0)) as producer:
            sent = []
            until = time.monotonic() + 3.3
            while time.monotonic() < until:
                sent.append(await producer.send_many([ProducerRecord(topic_name, b"v")] * 10))
                await asyncio.sleep(0.02)
            offsets = [m.offset for some in sent for m in await some if isinstance(m, RecordMetadata)]
        assert offsets == list(range(10 * len(sent)))
    assert len(given_tokens) >= 3

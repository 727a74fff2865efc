"""Sockets are secured as the settings define, and no secret is exposed."""

from __future__ import annotations

import asyncio
import logging
import queue
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiokafka.protocol.admin import SaslAuthenticateRequest_v0
from pydantic import SecretStr

from penstock.shared.clients.connection.connection import Connection
from penstock.shared.clients.connection.security import (
    TOKEN_CALLS_MAX,
    SeenThrough,
    TokenProvider,
    aiokafka_options,
    ssl_context,
)
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import AuthenticationFailed, BrokerNotAvailable, ConfigError
from penstock.shared.common.settings import KafkaSettings
from tests.integration.certificates import Authority

SECRET = "open-sesame"
HERE = "penstock_test_tokens"
threads: list[int] = []


def blocking() -> str:
    threads.append(threading.get_ident())
    return SECRET


hanging_calls: queue.SimpleQueue[None] = queue.SimpleQueue()
released = threading.Event()


def hanging() -> str:
    hanging_calls.put(None)
    released.wait()
    return SECRET


async def awaiting() -> str:
    threads.append(threading.get_ident())
    await asyncio.sleep(0)
    return SECRET


def failing() -> str:
    raise RuntimeError(SECRET)


def empty() -> str:
    return ""


def no_token() -> int:
    return 5


NOT_A_FUNCTION = 5


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this file importable under a name that a setting can contain."""

    threads.clear()
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def sasl(mechanism: str = "SCRAM-SHA-256") -> KafkaSettings:
    return KafkaSettings(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=mechanism,
        sasl_username="ali",
        sasl_password=SecretStr(SECRET),
    )


def test_secrets_reach_the_socket_and_nothing_else() -> None:
    """The password is in the socket's options, and in no repr of the settings, the connection or the producer."""
    assert aiokafka_options(sasl(), "c")["sasl_plain_password"] == SECRET
    shown = [f"{it!r} {it!s}" for it in (sasl(), Connection(sasl()), Producer(sasl()), sasl().model_dump())]
    assert SECRET not in "".join(shown)


def test_rejected_settings_do_not_show_secrets() -> None:
    """A validation error names the rejected setting without showing any values."""
    with pytest.raises(ConfigError, match="sasl_mechanism, sasl_username") as caught:
        KafkaSettings(security_protocol="SASL_SSL", sasl_password=SECRET)
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_each_mechanism_requires_its_credentials(mechanism: str) -> None:
    """A user without a password is rejected with the setting's name before any connection is made."""
    with pytest.raises(ConfigError, match="security_protocol=SASL_SSL also needs sasl_password"):
        KafkaSettings(security_protocol="SASL_SSL", sasl_mechanism=mechanism, sasl_username="ali")
    assert aiokafka_options(sasl(mechanism), "c")["sasl_mechanism"] == mechanism


def test_oauthbearer_needs_a_token_provider_alone() -> None:
    """OAUTHBEARER takes a token provider, and no user or password."""
    with pytest.raises(ConfigError, match="security_protocol=SASL_SSL also needs sasl_oauth_token_provider"):
        KafkaSettings(security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER")
    with pytest.raises(ConfigError, match="sasl_oauth_token_provider"):
        KafkaSettings(sasl_oauth_token_provider="no function")
    options = aiokafka_options(oauth("blocking"), "c")
    assert repr(options["sasl_oauth_token_provider"]) == f"<TokenProvider {HERE}:blocking>"
    assert "sasl_plain_password" not in options


def oauth(function: str) -> KafkaSettings:
    return KafkaSettings(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=f"{HERE}:{function}",
    )


async def test_token_providers_may_be_sync_or_async() -> None:
    """A coroutine function runs on the event loop, and a plain function in a thread."""
    assert await TokenProvider(f"{HERE}:awaiting").token() == SECRET
    assert threads == [threading.get_ident()]
    assert await TokenProvider(f"{HERE}:blocking").token() == SECRET
    assert threads[1] != threading.get_ident()


async def test_token_providers_that_hang_keep_no_other_thread() -> None:
    """All other calls in threads of the event loop continue."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    provider = TokenProvider(f"{HERE}:hanging")
    calls = [asyncio.ensure_future(provider.token()) for _ in range(TOKEN_CALLS_MAX + 1)]
    while hanging_calls.qsize() < TOKEN_CALLS_MAX:  # noqa: ASYNC110 - other threads fill it
        await asyncio.sleep(0)
    assert await asyncio.to_thread(lambda: 7) == 7
    released.set()
    assert await asyncio.gather(*calls) == [SECRET] * (TOKEN_CALLS_MAX + 1)


async def test_a_token_provider_that_fails() -> None:
    """An exception of the token provider is retriable. A return value that is not a token is a permanent error."""
    with pytest.raises(BrokerNotAvailable, match=f"{HERE}:failing: no token: RuntimeError") as caught:
        await TokenProvider(f"{HERE}:failing").token()
    assert SECRET not in str(caught.value)
    with pytest.raises(AuthenticationFailed, match="got ''"):
        await TokenProvider(f"{HERE}:empty").token()
    with pytest.raises(AuthenticationFailed, match="got int"):
        await TokenProvider(f"{HERE}:no_token").token()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:token", "no module 'no_such_module'"),
        (f"{HERE}:nothing", "has no function 'nothing'"),
        (f"{HERE}:NOT_A_FUNCTION", "has no function 'NOT_A_FUNCTION'"),
    ],
)
def test_a_token_provider_that_cannot_be_imported(path: str, reason: str) -> None:
    """A client cannot be created with a token provider that cannot be imported. The error names the provider."""
    settings = KafkaSettings(security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", sasl_oauth_token_provider=path)
    with pytest.raises(ConfigError, match=rf"kafka\.sasl_oauth_token_provider: .*{reason}"):
        Producer(settings)


async def test_an_oauthbearer_error_is_acknowledged() -> None:
    """If the broker sends an error status, the client responds with one byte to get the error. An empty challenge means
    success."""
    provider = TokenProvider(f"{HERE}:blocking")
    accepted = SeenThrough(sasl_oauth_token_provider=provider)
    assert await accepted.step(None) == (f"n,,\x01auth=Bearer {SECRET}\x01\x01".encode(), True)
    assert await accepted.step(b"") is None
    exchange = SeenThrough(sasl_oauth_token_provider=provider)
    await exchange.step(None)
    assert await exchange.step(b'{"status":"invalid_token"}') == (b"\x01", True)


def test_sasl_exchanges_are_logged_without_their_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """aiokafka's request log shows that a SASL exchange happened, but not its bytes."""
    with caplog.at_level(logging.DEBUG, "aiokafka"):
        request = SaslAuthenticateRequest_v0(f"\0ali\0{SECRET}".encode())
        logging.getLogger("aiokafka.conn").debug("Request to %s:%d %d: %s", "h", 1, 2, request)
    assert "SaslAuthenticateRequest_v0(hidden)" in caplog.text
    assert SECRET not in caplog.text


def test_ssl(tmp_path: Path) -> None:
    """TLS certificates are verified against the configured authorities. An error names a file that cannot be used."""
    assert ssl_context(KafkaSettings()) is None
    context = ssl_context(KafkaSettings(security_protocol="SSL"))
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match=r"kafka\.ssl_cafile: .*missing\.pem"):
        ssl_context(KafkaSettings(security_protocol="SSL", ssl_cafile=missing))
    with pytest.raises(ConfigError, match=r"kafka\.ssl_certfile: .*missing\.pem"):
        ssl_context(KafkaSettings(security_protocol="SSL", ssl_certfile=missing))
    certfile = Authority(tmp_path, "authority").issue("client")
    assert ssl_context(KafkaSettings(security_protocol="SSL", ssl_certfile=certfile, ssl_keyfile=certfile)) is not None
    # The certificate is valid, and OpenSSL does not report that the key is not.
    with pytest.raises(ConfigError, match=r"kafka\.ssl_certfile: .*client\.pem, kafka\.ssl_keyfile: .*missing\.pem"):
        ssl_context(KafkaSettings(security_protocol="SSL", ssl_certfile=certfile, ssl_keyfile=missing))
    with pytest.raises(ConfigError, match=r"kafka\.ssl_cafile: .*missing\.pem"):
        Producer(KafkaSettings(security_protocol="SSL", ssl_cafile=missing))
    with pytest.raises(ConfigError, match="ssl_certfile"):
        KafkaSettings(security_protocol="SSL", ssl_keyfile=missing)

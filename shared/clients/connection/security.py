"""Socket security: the TLS context, SASL options and OAUTHBEARER tokens. Also limits aiokafka's log lines.

aiokafka logs retries as errors. Penstock's clients report the outcome of a request themselves, so aiokafka's log lines
about these clients are dropped (`OfOthers`). Those about a user's own aiokafka clients are kept. At DEBUG aiokafka logs
each request and response. SASL requests contain the password, so they are logged without their bytes (`HideSecrets`).

Certificates and passwords are read when a client opens its connection, tokens each time a socket is set up.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import ssl
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import OAuthAuthenticator
from aiokafka.protocol import admin

from penstock.shared.common.errors import AuthenticationFailed, BrokerNotAvailable, ConfigError, PenstockError
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.user_modules import lacks_module

OAUTH_SEPARATOR = "\x01"
TOKEN_CALLS_MAX = 4
"""The most calls of a token function at once, if the function is not `async`."""
SECRET_STRUCTS = (
    admin.SaslAuthenticateRequest_v0,
    admin.SaslAuthenticateRequest_v1,
    admin.SaslAuthenticateResponse_v0,
    admin.SaslAuthenticateResponse_v1,
)


def ssl_context(kafka_settings: KafkaSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the settings. Returns None without TLS.

    Raises ConfigError, which names the invalid file. For a certificate with a key file it names both files.
    """
    if not kafka_settings.security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=kafka_settings.ssl_cafile)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"kafka.ssl_cafile: {kafka_settings.ssl_cafile}: {e}") from None
    if kafka_settings.ssl_certfile is not None:
        password = kafka_settings.ssl_key_password
        try:
            context.load_cert_chain(
                kafka_settings.ssl_certfile,
                kafka_settings.ssl_keyfile,
                # Without a password OpenSSL would prompt for one on the terminal.
                password=password.get_secret_value() if password is not None else "",
            )
        except (OSError, ssl.SSLError) as e:
            # OpenSSL does not report which of the two files is invalid.
            files = {"ssl_certfile": kafka_settings.ssl_certfile, "ssl_keyfile": kafka_settings.ssl_keyfile}
            named = ", ".join(f"kafka.{name}: {file}" for name, file in files.items() if file is not None)
            raise ConfigError(f"{named}: {e}") from None
    return context


def aiokafka_options(kafka_settings: KafkaSettings, client_id: str) -> dict[str, Any]:
    """Return the arguments for a connection that all classes of aiokafka take.

    Raises ConfigError for an invalid certificate file or a missing token function.
    """
    options: dict[str, Any] = {
        "bootstrap_servers": kafka_settings.bootstrap_servers.split(","),
        "client_id": client_id,
        "request_timeout_ms": kafka_settings.request_timeout_ms,
        "metadata_max_age_ms": kafka_settings.metadata_max_age_ms,
        "connections_max_idle_ms": kafka_settings.connections_max_idle_ms,
        "retry_backoff_ms": kafka_settings.retry_backoff_ms,
        "security_protocol": kafka_settings.security_protocol,
        "ssl_context": ssl_context(kafka_settings),
    }
    if kafka_settings.security_protocol.startswith("SASL"):
        options["sasl_mechanism"] = kafka_settings.sasl_mechanism
        if kafka_settings.sasl_mechanism == "OAUTHBEARER":
            assert kafka_settings.sasl_oauth_token_provider is not None
            options["sasl_oauth_token_provider"] = TokenProvider(kafka_settings.sasl_oauth_token_provider)
        else:
            assert kafka_settings.sasl_password is not None
            options["sasl_plain_username"] = kafka_settings.sasl_username
            options["sasl_plain_password"] = kafka_settings.sasl_password.get_secret_value()
    return options


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    """Calls the user's function `module:function` for a token, each time a socket is set up.

    The function takes no arguments and returns a str, or an awaitable of one. A function that is not `async` runs in
    one of TOKEN_CALLS_MAX threads, which a call that never ends keeps for ever: the function must limit its time. If
    the function raises, the connection attempt fails.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._function = _import_token_provider(path)
        # Calls that hang do not keep the event loop's threads, which all other work shares.
        self._threads = ThreadPoolExecutor(TOKEN_CALLS_MAX, thread_name_prefix="token")

    def __repr__(self) -> str:
        return f"<TokenProvider {self._path}>"

    async def token(self) -> str:
        """Return a SASL/OAUTHBEARER token from the configured function."""
        where = f"kafka.sasl_oauth_token_provider={self._path}"
        try:
            # A function that is not `async` may block the event loop.
            token = (
                self._function()
                if _is_async_token_provider(self._function)
                else await asyncio.get_running_loop().run_in_executor(self._threads, self._function)
            )
            if inspect.isawaitable(token):
                token = await token
        except PenstockError:
            raise
        except Exception as e:
            # The message may contain the secret that the token is requested with.
            raise BrokerNotAvailable(f"{where}: no token: {type(e).__name__}") from e
        if not isinstance(token, str) or not token or OAUTH_SEPARATOR in token:
            raise AuthenticationFailed(f"{where}: expected a token as str, got {_describe_invalid_token(token)}")
        return token


class SeenThrough(OAuthAuthenticator):  # type: ignore[misc]
    """OAUTHBEARER that reads the broker's error."""

    async def step(self, payload: bytes | None) -> tuple[bytes, bool] | None:
        # The broker has sent its error. It waits for this byte before it rejects the client (RFC 7628, 3.2.3).
        if self._token_sent and payload:
            return OAUTH_SEPARATOR.encode(), True
        step: tuple[bytes, bool] | None = await super().step(payload)
        return step


class HideSecrets(logging.Filter):
    """Removes the bytes of SASL exchanges from log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{type(value).__name__}(hidden)" if isinstance(value, SECRET_STRUCTS) else value
                for value in record.args
            )
        return True


logging.getLogger("aiokafka.conn").addFilter(HideSecrets())


class OfOthers(logging.Filter):
    """Drops aiokafka's log lines about objects of the classes `clients`.

    These are Penstock's clients, which write their own lines. Lines about a user's own aiokafka clients are kept.
    """

    def __init__(self, *clients: type) -> None:
        super().__init__()
        self._clients = clients

    def filter(self, record: logging.LogRecord) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), self._clients):
                return False
            if frame.f_globals.get("__name__", "").split(".")[0] not in {"logging", "aiokafka"}:
                return True
            frame = frame.f_back
        return True


def _import_token_provider(path: str) -> Callable[[], Any]:
    setting = "kafka.sasl_oauth_token_provider"
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        # The module exists, and an import within it failed: this is the user's error, not a wrong setting.
        if not lacks_module(e, module_name):
            raise
        raise ConfigError(f"{setting}: no module {e.name!r}") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{setting}: {module_name} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _is_async_token_provider(function: Callable[[], Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _describe_invalid_token(token: object) -> str:
    return type(token).__name__ if not isinstance(token, str) else "one with a control character" if token else "''"

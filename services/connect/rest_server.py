"""The REST server of a Connect worker: its address, its authentication, and its address for other workers.

It listens at the first of `listeners`. Other workers use the address in `rest.advertised.host.name` and
`rest.advertised.port`. The default is the listener's address, with the machine's name if it has no host.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import SecretStr

from penstock.api.settings import Credential, check_secrets, is_loopback
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HttpSettings
from penstock.shared.connect.redaction import variables_in
from penstock.shared.connect.runtime.worker_config import WorkerConfig

if TYPE_CHECKING:
    from penstock.api.connect.routes import StartingApp
    from penstock.api.http.auth import Guard

BODY_BYTES_MAX = 67_108_864
"""The longest body of a request. A worker sends all task configs of a connector to the leader in one request, and each
contains the connector's settings."""
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - Kafka Connect's default listener has no host


def rest_listener(config: WorkerConfig) -> HttpSettings:
    """Return the address of the REST server: the first of `listeners`. Raises ConfigError if it is invalid."""
    listeners = config["listeners"]
    text = listeners[0] if listeners else ""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise ConfigError(f"listeners: {text}: {e}") from None
    if parts.scheme.lower() != "http":
        raise ConfigError(
            f"listeners: {text!r}: must be http://HOST:PORT (for https use a reverse proxy that terminates TLS)"
        )
    return HttpSettings(
        host=parts.hostname or EVERY_ADDRESS,
        port=8083 if port is None else port,
        max_head_bytes=config["rest.max.head.bytes"],
    )


def guarded_rest_app(app: StartingApp, config: WorkerConfig, http: HttpSettings) -> Guard:
    """Return the REST app behind its authentication. If no token and no users are configured, REST is open, as in Kafka
    Connect.

    At a loopback address, open REST accepts only loopback names as Host header, unless `rest.advertised.host.name` is
    set. Raises ConfigError for an invalid user, for a secret that `check_secrets` rejects, and for one that has a
    variable without a value.
    """
    for name in ("rest.auth.token", "rest.auth.users"):
        # Its text, which anyone can guess, would be the secret.
        if variables_in(config[name].value):
            raise ConfigError(f"{name}: the variable has no value, or config.providers does not name its provider")
    token = SecretStr(config["rest.auth.token"].value) if config["rest.auth.token"].value else None
    users: dict[str, Credential] = {}
    for pair in config.rest_users:
        name, colon, password = pair.partition(":")
        if not colon or not name:
            raise ConfigError("rest.auth.users: must be user:password, comma-separated")
        if name in users:
            raise ConfigError(f"rest.auth.users: user {name!r} has more than one password")
        users[name] = Credential(secret=SecretStr(password), scopes=("admin",))
    secrets = [*([token] if token else []), *(user.secret for user in users.values())]
    try:
        check_secrets(http.host, secrets, insecure_no_auth=True)
    except ConfigError as e:
        raise ConfigError(str(e).replace("auth_token, credentials", "rest.auth.token, rest.auth.users")) from None
    local_hosts_only = not secrets and is_loopback(http.host) and not config["rest.advertised.host.name"]
    # Needs the extra `server`, which is not required to read the settings.
    from penstock.api.http.auth import Guard

    return Guard(
        app, auth_token=token, credentials=users, local_hosts_only=local_hosts_only, admin_body_bytes_max=BODY_BYTES_MAX
    )


def is_rest_open(config: WorkerConfig, http: HttpSettings) -> bool:
    """Return whether the REST server has no authentication and other machines can reach it."""
    has_auth = config["rest.auth.token"].value or config.rest_users
    return not has_auth and not is_loopback(http.host)


def worker_id_of(config: WorkerConfig, http: HttpSettings, port: int) -> str:
    """Return the worker's id: the `host:port` at which other workers reach its REST server.

    `port` is the port of the listener. It is used unless `rest.advertised.port` is set.
    """
    host = config["rest.advertised.host.name"] or (
        socket.getfqdn() if http.host in (EVERY_ADDRESS, "::") else http.host
    )
    advertised_port = config["rest.advertised.port"] or port
    return f"[{host}]:{advertised_port}" if ":" in host else f"{host}:{advertised_port}"

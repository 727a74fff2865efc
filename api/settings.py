"""Settings of the HTTP interface: topics, limits of requests, and credentials.

>>> flights = TopicSettings(key=["/carrier", "/origin"], time="/scheduled_ms")
>>> IngestSettings(topics={"flights": flights}).for_topic("flights").key
('/carrier', '/origin')
>>> IngestSettings(default_topic={"allowed": False}).for_topic("anything else").allowed
False
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.json_decoding import JSON_POINTER
from penstock.shared.common.settings import NonEmptyPath, PositiveMs, Section, ServiceSettings
from penstock.shared.common.time_text import TimeUnit, require_time

HOUR_MS = 3_600_000
TOKEN_LENGTH_MIN = 16


def _check_json_pointer(pointer: str) -> str:
    if not pointer or not JSON_POINTER.fullmatch(pointer):
        raise ValueError("a JSON pointer starts with '/', and '~' is followed by 0 or 1 (RFC 6901)")
    return pointer


def _event_time_as_text(value: Any) -> Any:
    """Return an event time in ingest's settings as text, since TOML parses dates and times to objects."""
    return value.isoformat() if isinstance(value, date) else value


CloudEventsForm = Literal["data", "envelope"]
Pointer = Annotated[str, AfterValidator(_check_json_pointer)]
EventTime = Annotated[str, BeforeValidator(_event_time_as_text), AfterValidator(require_time)]
PositiveCount = Annotated[int, Field(gt=0)]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]


class TopicSettings(Section):
    """How ingest converts events of one topic to records."""

    allowed: bool = Field(default=True, description="false: events for this topic are rejected")
    key: tuple[Pointer, ...] = Field(
        default=(), description="JSON pointers whose values, joined with '-', are the record's key"
    )
    time: Pointer | None = Field(
        default=None, description="JSON pointer to the event time; default: the time of arrival"
    )
    time_unit: TimeUnit = Field(
        default="ms", description="unit of numeric event times: s, ms, us or ns since the epoch"
    )
    min_event_time: EventTime | None = Field(
        default=None, description="the earliest event time; default: that of [ingest]"
    )
    key_header: HeaderName | None = Field(
        default=None, description="request header with the key of events that lack one"
    )
    time_header: HeaderName | None = Field(
        default=None, description="request header with the time of events that lack one"
    )
    cloudevents: CloudEventsForm = Field(
        default="data", description="how a CloudEvent is stored: data (attributes become headers) or envelope"
    )
    json_schema: NonEmptyPath | None = Field(
        default=None, description="file with the JSON Schema that validates events"
    )


class IngestSettings(Section):
    """Topics of ingest, and the limits of its requests."""

    topics: dict[str, TopicSettings] = Field(default={}, description="settings by topic name")
    default_topic: TopicSettings = Field(default=TopicSettings(), description="settings of topics without an entry")
    max_line_bytes: PositiveCount = Field(
        default=1_048_576, description="the longest NDJSON line, JSON object or array element"
    )
    max_body_bytes: PositiveCount = Field(
        default=4_194_304,
        description="the longest buffered body, after decompression; NDJSON is buffered only if stored atomically",
    )
    max_in_flight_records: PositiveCount = Field(
        default=20_000, description="most unacknowledged records of one request, and of all bulk requests together"
    )
    bulk_requests_at_once: PositiveCount = Field(
        default=4, description="bulk requests (over 64 KiB or 1,000 events) that send at a time, in order of arrival"
    )
    max_errors: PositiveCount = Field(default=1_000, description="errors after which a request is stopped")
    max_offsets: PositiveCount = Field(
        default=100_000, description="most offsets in a response to ?offsets=true, or in a line of a streamed one"
    )
    max_future_ms: PositiveMs = Field(
        default=HOUR_MS, description="how far ahead of the wall clock an event time may be"
    )
    min_event_time: EventTime = Field(
        default="2000-01-01",
        description="the earliest event time, as ISO 8601; an event with an earlier one is rejected",
    )
    ack_timeout_ms: PositiveMs = Field(default=30_000, description="how long a record may wait for its acknowledgement")
    body_timeout_ms: PositiveMs = Field(
        default=30_000, description="how long a client may pause within a body, and how long a line of NDJSON may take"
    )
    whole_body_timeout_ms: PositiveMs = Field(
        default=60_000, description="how long a buffered body (see max_body_bytes) may take to arrive"
    )
    max_body_events: PositiveCount = Field(
        default=100_000, description="most events of a buffered body (see max_body_bytes); then 413"
    )
    max_concurrent_requests: PositiveCount = Field(
        default=1_000, description="requests of one client at a time; then 429"
    )
    max_requests_per_second: PositiveCount | None = Field(
        default=None, description="requests of one client; default: no limit"
    )
    max_records_per_second: PositiveCount | None = Field(
        default=None, description="records of one client; default: no limit"
    )
    atomic_producers: PositiveCount = Field(default=4, description="transactions of ?atomic=true that may run at once")
    idempotency_topic: str = Field(
        default="penstock-ingest-keys", description="topic of the Idempotency-Keys; created if missing"
    )
    idempotency_partitions: PositiveCount = Field(default=8, description="partitions of that topic if it is created")
    idempotency_ttl_ms: PositiveMs = Field(default=24 * HOUR_MS, description="how long an Idempotency-Key is stored")
    max_idempotency_bytes: PositiveCount = Field(
        default=33_554_432, description="memory for the keys of a partition; then 429"
    )

    def for_topic(self, topic: str) -> TopicSettings:
        """Return the settings of a topic, or the default ones."""
        return self.topics.get(topic, self.default_topic)


Scope = Literal["ingest", "read", "admin"]


class Credential(Section):
    """One client's secret, sent as a bearer token or as the password of basic auth, and its scopes."""

    model_config = ConfigDict(hide_input_in_errors=True)

    secret: SecretStr
    scopes: tuple[Scope, ...] = Field(default=("read",), description="ingest, read, admin (includes read)")


class GuardedSettings(ServiceSettings):
    """Settings of a service that needs credentials if other machines can reach it, unless `insecure_no_auth` is set.

    Without the needed credentials the settings are invalid.
    """

    auth_token: SecretStr | None = Field(
        default=None, description="bearer token with all scopes (Authorization: Bearer)"
    )
    credentials: dict[str, Credential] = Field(default={}, description="clients by name, each with secret and scopes")
    cors_origins: tuple[str, ...] = Field(
        default=(), description="origins of web pages that may send requests, as https://host; default: none"
    )
    insecure_no_auth: bool = Field(
        default=False, description="serve other machines without a token (a trusted network)"
    )

    @model_validator(mode="after")
    def _check_auth(self) -> Self:
        try:
            # An empty token is one, too, and rejected as too short: a header with `Bearer` alone would match it.
            tokens = [] if self.auth_token is None else [self.auth_token]
            secrets = [*tokens, *(credential.secret for credential in self.credentials.values())]
            check_secrets(self.http.host, secrets, insecure_no_auth=self.insecure_no_auth)
        except ConfigError as e:
            raise ValueError(str(e)) from None
        return self

    @property
    def local_hosts_only(self) -> bool:
        """Whether only requests with `localhost` or a loopback address as Host are served. True if the service listens
        on such an address without credentials.
        """
        return self.auth_token is None and not self.credentials and is_loopback(self.http.host)

    def tokens_by_scope(self) -> dict[Scope, str]:
        """Return a bearer token for each scope that a client with these settings' credentials can have.

        A token is `auth_token`, or the secret of the first credential that lists the scope. If none lists `read`, the
        token for `admin` also serves for it. A service sends these tokens to services with the same settings.
        """
        if self.auth_token is not None:
            return dict.fromkeys(("ingest", "read", "admin"), self.auth_token.get_secret_value())
        found: dict[Scope, str] = {}
        for credential in self.credentials.values():
            for scope in credential.scopes:
                found.setdefault(scope, credential.secret.get_secret_value())
        if "admin" in found:
            found.setdefault("read", found["admin"])
        return found


def check_secrets(host: str, secrets: Sequence[SecretStr], *, insecure_no_auth: bool) -> None:
    """Check the secrets in the settings of an HTTP interface that listens at `host`.

    Raises ConfigError if a secret is too short, is not unique, or cannot be sent as a bearer token. Without
    `insecure_no_auth`, raises it also if other machines could reach the interface without credentials.
    """
    values = [secret.get_secret_value() for secret in secrets]
    if any(len(value) < TOKEN_LENGTH_MIN for value in values):
        raise ConfigError(f"auth_token, credentials: a secret must have at least {TOKEN_LENGTH_MIN} characters")
    # Clients and proxies remove blanks around a header's value, and bytes beyond ASCII have no agreed encoding in it.
    if not all(value.isascii() and value.isprintable() and value == value.strip() for value in values):
        raise ConfigError(
            "auth_token, credentials: a secret must be printable ASCII without a blank or a line end around it"
        )
    if len(set(values)) < len(values):
        raise ConfigError("auth_token, credentials: two of them have the same secret")
    if not values and not is_loopback(host) and not insecure_no_auth:
        raise ConfigError(
            f"auth_token or credentials: required since http.host={host} is reachable from other machines"
            " (or set insecure_no_auth=true in a trusted network)"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address. Any other name is not, whatever it resolves to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

"""The common code of converters with a schema registry: the wire format, subjects, and known schemas by id.

A value in Kafka is a zero byte, the id of its schema (4 bytes, big-endian), and the encoded value. Schemas are cached
by id, since the schema of an id never changes, and so are the ids of schemas to write. If a schema or id is not in the
cache, `MoreNeeded` is raised. Its `fetch` requests the schema or id from the registry.

>>> framed(7, b"value"), unframed(framed(7, b"value"))
(b'\\x00\\x00\\x00\\x00\\x07value', (7, b'value'))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.json_decoding import InvalidJson, decode_schema
from penstock.shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Type, at_least, non_empty, one_of
from penstock.shared.connect.converters.schema_registry_client import RegistryAccess, RegistryClient, RegistrySchema
from penstock.shared.connect.errors import MoreNeeded

K = TypeVar("K")
V = TypeVar("V")

MAGIC = b"\x00"
HEAD_BYTES = 5
STRATEGIES = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")
STRATEGY_PACKAGE = "io.confluent.kafka.serializers.subject."


def framed(id: int, encoded: bytes) -> bytes:
    """Return an encoded value in the registry's wire format, after its schema's id."""
    return MAGIC + id.to_bytes(4, "big") + encoded


def unframed(data: bytes) -> tuple[int, bytes]:
    """Return the schema's id and the encoded value of the registry's wire format. Raises DataError for other bytes."""
    if len(data) < HEAD_BYTES or data[:1] != MAGIC:
        raise DataError("Unknown magic byte!")
    return int.from_bytes(data[1:HEAD_BYTES], "big"), data[HEAD_BYTES:]


def registry_config() -> ConfigDef:
    """Return the settings that all converters with a schema registry have. Most have Confluent's names."""
    strategies = one_of(*STRATEGIES, *(STRATEGY_PACKAGE + name for name in STRATEGIES))
    return (
        ConfigDef()
        .define("schema.registry.url", Type.LIST, NO_DEFAULT, Importance.HIGH,
                "URLs of the schema registry, tried in this order.", non_empty)
        .define("basic.auth.credentials.source", Type.STRING, "URL", Importance.MEDIUM,
                "Source of user and password: URL, or USER_INFO for basic.auth.user.info.",
                one_of("URL", "USER_INFO", ignore_case=True))
        .define("basic.auth.user.info", Type.PASSWORD, "", Importance.MEDIUM, "User and password, as user:password.")
        .define("bearer.auth.token", Type.PASSWORD, "", Importance.MEDIUM, "Bearer token of the requests. Empty: none.")
        .define("auto.register.schemas", Type.BOOLEAN, True, Importance.MEDIUM,
                "Whether schemas are registered when they are written. false: they must be registered already.")
        .define("use.latest.version", Type.BOOLEAN, False, Importance.LOW,
                "Whether to write with the latest schema of the subject. Needs auto.register.schemas=false.")
        .define("normalize.schemas", Type.BOOLEAN, False, Importance.LOW, "Whether the registry normalizes schemas.")
        .define("key.subject.name.strategy", Type.STRING, "TopicNameStrategy", Importance.MEDIUM,
                "Strategy for the subject names of keys.", strategies)
        .define("value.subject.name.strategy", Type.STRING, "TopicNameStrategy", Importance.MEDIUM,
                "Strategy for the subject names of values.", strategies)
        .define("schemas.cache.size", Type.INT, 1000, Importance.LOW,
                "Maximum number of schemas in the cache.", at_least(1))
        .define("schema.registry.request.timeout.ms", Type.INT, 30_000, Importance.LOW,
                "Maximum time of each step of a request: connect, send, and wait for data.", at_least(1))
    )  # fmt: skip


def subject_of(strategy: str, topic: str, record_name: str | None, *, is_key: bool) -> str:
    """Return a schema's subject in the registry. Raises DataError if the strategy needs a name that the schema lacks.

    >>> subject_of("TopicNameStrategy", "clicks", None, is_key=False)
    'clicks-value'
    >>> subject_of("TopicRecordNameStrategy", "clicks", "a.Click", is_key=True)
    'clicks-a.Click'
    """
    strategy = strategy.removeprefix(STRATEGY_PACKAGE)
    if strategy == "TopicNameStrategy":
        return f"{topic}-{'key' if is_key else 'value'}"
    if not record_name:
        raise DataError(f"{strategy} needs a schema with a name, in a record of topic {topic}")
    return record_name if strategy == "RecordNameStrategy" else f"{topic}-{record_name}"


@dataclass
class SchemaRegistrySerde:
    """One converter's schemas in the registry: the known schemas and ids, and the requests for unknown ones.

    It is the common part of serializer and deserializer (Confluent: `AbstractKafkaSchemaSerDe`).
    """

    client: RegistryClient
    kind: str
    """The registry's name for the type of its schemas: AVRO or JSON."""
    is_key: bool
    strategy: str
    register: bool
    use_latest: bool
    cache_size: int

    def __post_init__(self) -> None:
        self._by_id: dict[int, RegistrySchema] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._latest: dict[str, tuple[int, RegistrySchema]] = {}

    @classmethod
    def of(cls, configs: Mapping[str, Any], kind: str, *, is_key: bool) -> SchemaRegistrySerde:
        """Return the serde of a converter's settings. ConfigError names the setting that is wrong."""
        values = registry_config().parse(configs)
        user = values["basic.auth.user.info"].value
        by_user_info = values["basic.auth.credentials.source"].upper() == "USER_INFO"
        if by_user_info and ":" not in user:
            raise ConfigError("basic.auth.user.info must be user:password")
        if values["use.latest.version"] and values["auto.register.schemas"]:
            raise ConfigError("use.latest.version needs auto.register.schemas=false")
        access = RegistryAccess(
            tuple(url.rstrip("/") for url in values["schema.registry.url"]),
            user=user if by_user_info else "",
            token=values["bearer.auth.token"].value,
            timeout_ms=values["schema.registry.request.timeout.ms"],
            normalize=values["normalize.schemas"],
        )
        return cls(
            RegistryClient(access),
            kind,
            is_key,
            values[f"{'key' if is_key else 'value'}.subject.name.strategy"],
            register=values["auto.register.schemas"],
            use_latest=values["use.latest.version"],
            cache_size=values["schemas.cache.size"],
        )

    def schema(self, id: int) -> RegistrySchema:
        """Return the schema with that id. Raises MoreNeeded if it is not known yet, DataError if it is of another
        type."""
        found = self._by_id.get(id)
        if found is None:

            async def fetch_schema() -> None:
                self._cache(self._by_id, id, await self.client.by_id(id))

            raise MoreNeeded(f"schema {id}", fetch_schema)
        if found.kind != self.kind:
            raise DataError(f"schema {id} is of type {found.kind}, not {self.kind}")
        return found

    def to_write(self, topic: str, text: str, record_name: str | None) -> tuple[int, RegistrySchema | None]:
        """Return the id under which to write a value of this schema, and None. With `use_latest`, return the id of the
        subject's latest schema, and that schema.

        Raises MoreNeeded if the result is not cached, and DataError as `subject_of` does.
        """
        subject = subject_of(self.strategy, topic, record_name, is_key=self.is_key)
        if self.use_latest:
            if subject not in self._latest:

                async def fetch_latest_schema() -> None:
                    self._cache(self._latest, subject, await self.client.latest(subject))

                raise MoreNeeded(f"the latest schema of {subject}", fetch_latest_schema)
            return self._latest[subject]
        id = self._ids.get((subject, text))
        if id is None:

            async def fetch_schema_id() -> None:
                request = self.client.register if self.register else self.client.lookup
                self._cache(self._ids, (subject, text), await request(subject, self.kind, text))

            raise MoreNeeded(f"the id of a schema of {subject}", fetch_schema_id)
        return id, None

    def _cache(self, cache: dict[K, V], key: K, value: V) -> None:
        if len(cache) >= self.cache_size:
            cache.pop(next(iter(cache)))
        cache[key] = value


def parse_registered_schema(text: str) -> Any:
    """Parse the JSON of a schema from the schema registry. Raises DataError if it is not JSON."""
    try:
        return decode_schema(text)
    except InvalidJson as e:
        raise DataError(f"the registry's schema is not JSON: {e}") from None

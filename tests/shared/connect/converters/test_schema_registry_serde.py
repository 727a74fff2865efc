"""Subjects, and what a converter asks its registry."""

from __future__ import annotations

import pytest

from penstock.shared.connect.converters.schema_registry_serde import Registry, subject_of
from penstock.shared.connect.errors import DataError, MoreNeeded
from tests.shared.connect.converters.converting import fetching
from tests.shared.connect.converters.registry_server import SchemaRegistry, schema_registry

INT = '"int"'


def registry_of(server: SchemaRegistry, **settings: str) -> Registry:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    return Registry.of({"schema.registry.url": server.url, **given, "of.another": "x"}, "AVRO", is_key=False)


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        ("TopicNameStrategy", "t-value"),
        ("io.confluent.kafka.serializers.subject.RecordNameStrategy", "a.R"),
        ("TopicRecordNameStrategy", "t-a.R"),
    ],
)
async def test_subjects_are_named_by_the_strategy(strategy: str, subject: str) -> None:
    """Each strategy's subject is where the schema is registered; those that go by a record's name need one."""
    async with schema_registry() as server:
        registry = registry_of(server, value_subject_name_strategy=strategy)
        assert await fetching(lambda: registry.to_write("t", INT, "a.R")) == (1, None)
        assert server.subjects == {subject: [1]}
    if "Record" in strategy:
        with pytest.raises(DataError, match="needs a schema with a name"):
            subject_of(strategy, "t", None, is_key=False)


async def test_without_registering_a_schema_must_be_there() -> None:
    """The subject is asked for its id of the schema, and nothing is added to it."""
    async with schema_registry() as server:
        registry = registry_of(server, auto_register_schemas="false")
        with pytest.raises(DataError, match="Subject 't-value' not found"):
            await fetching(lambda: registry.to_write("t", INT, None))
        id = server.add("t-value", "int")
        assert await fetching(lambda: registry.to_write("t", INT, None)) == (id, None)
        with pytest.raises(DataError, match="error code: 40403"):
            await fetching(lambda: registry.to_write("t", '"long"', None))


async def test_schemas_of_another_type_are_refused() -> None:
    """An Avro converter does not read what was written under a JSON Schema; an unknown id the registry refuses."""
    async with schema_registry() as server:
        registry = registry_of(server)
        id = server.add("t-value", {"type": "string"}, "JSON")
        with pytest.raises(DataError, match="of type JSON, not AVRO"):
            await fetching(lambda: registry.schema(id))
        with pytest.raises(DataError, match="Schema not found"):
            await fetching(lambda: registry.schema(99))


async def test_what_is_kept_is_bounded() -> None:
    """The oldest schema is forgotten, and asked for again."""
    async with schema_registry() as server:
        registry = registry_of(server, schemas_cache_size="2")
        for kind in ("int", "long", "string"):
            server.add("t-value", kind)
        for id in (1, 2, 3):
            await fetching(lambda id=id: registry.schema(id))  # type: ignore[misc]
        assert registry.schema(3).text == '"string"'
        with pytest.raises(MoreNeeded):
            registry.schema(1)

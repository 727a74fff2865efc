"""The Avro converter, with its schemas in a registry."""

from __future__ import annotations

import datetime as dt
import io
import time
from dataclasses import replace
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.converters.avro import (
    AvroConverter,
    avro_library,
    change_from_avro,
    change_to_avro,
)
from penstock.shared.connect.converters.avro_schemas import (
    AVRO_ENUM,
    AVRO_UNION,
    for_fastavro,
    from_avro,
    to_avro,
)
from penstock.shared.connect.converters.schema_registry_serde import framed
from penstock.shared.connect.schema import (
    BOOLEAN,
    BYTES,
    FLOAT32,
    FLOAT64,
    INT8,
    INT32,
    INT64,
    OPTIONAL_INT64,
    OPTIONAL_STRING,
    STRING,
    Field,
    Schema,
    SchemaType,
    as_float32,
    date_schema,
    decimal_schema,
    decimal_to_bytes,
    time_schema,
    timestamp_schema,
)
from tests.shared.connect.converters.converting import fetching
from tests.shared.connect.converters.registry_server import SchemaRegistry, schema_registry

ADDRESS = Schema.struct("shop.Address", Field("street", STRING), Field("no", OPTIONAL_INT64))
ORDER = Schema.struct(
    "shop.Order",
    Field("id", INT64),
    Field("small", INT8),
    Field("paid", BOOLEAN),
    Field("note", OPTIONAL_STRING),
    Field("total", decimal_schema(2)),
    Field("day", date_schema()),
    Field("at", time_schema()),
    Field("made", timestamp_schema(optional=True)),
    Field("from", ADDRESS),
    Field("to", ADDRESS.as_optional()),
    Field("tags", Schema.array(STRING)),
    Field("counts", Schema.map(STRING, INT32)),
    Field("by_number", Schema.map(INT32, STRING)),
    Field("left", Schema(SchemaType.INT32, default=7)),
)
VALUE = {
    "id": 1,
    "small": -8,
    "paid": True,
    "note": None,
    "total": Decimal("12.50"),
    "day": dt.date(2026, 1, 2),
    "at": dt.time(3, 4, 5, 6000),
    "made": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
    "from": {"street": "A", "no": 3},
    "to": None,
    "tags": ["x", "y"],
    "counts": {"x": 1},
    "by_number": {4: "four"},
    "left": 2,
}


def converter(registry: SchemaRegistry, *, is_key: bool = False, **settings: str) -> AvroConverter:
    made = AvroConverter()
    given = {name.replace("_", "."): value for name, value in settings.items()}
    made.configure({"schema.registry.url": registry.url, **given}, is_key)
    return made


async def test_values_and_schemas_round_trip() -> None:
    """Every type is converted and back; the schema is registered once under the topic's
    subject and fetched once by its id.
    """
    async with schema_registry() as registry:
        writer, reader = converter(registry), converter(registry)
        data = await fetching(lambda: writer.from_connect_data("orders", ORDER, VALUE))
        assert data is not None
        assert data[:5] == b"\x00\x00\x00\x00\x01"
        assert await fetching(lambda: reader.to_connect_data("orders", data)) == (ORDER, VALUE)
        writer.from_connect_data("orders", ORDER, VALUE)
        reader.to_connect_data("orders", data)
        assert reader.to_connect_values("orders", [data, data]) == (ORDER, [VALUE, VALUE])
        assert registry.requested == ["POST /subjects/orders-value/versions", "GET /schemas/ids/1"]
        assert registry.subjects == {"orders-value": [1]}


async def test_a_float_keeps_its_digits() -> None:
    """A float of 21.3 is read as 21.3, and not as 21.299999237060547."""
    async with schema_registry() as registry:
        made = converter(registry)
        schema = Schema.struct("R", Field("x", FLOAT32), Field("y", FLOAT32.as_optional()), Field("n", INT64))
        value = {"x": 21.3, "y": None, "n": 1}
        data = await fetching(lambda: made.from_connect_data("t", schema, value))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (schema, value)


async def test_values_at_once_need_the_magic_byte() -> None:
    """A first byte that is not zero is an error of each way of reading, whatever schemas are known."""
    async with schema_registry() as registry:
        made = converter(registry)
        data = await fetching(lambda: made.from_connect_data("t", STRING, "a"))
        assert data is not None
        await fetching(lambda: made.to_connect_data("t", data))
        wrong = b"\x01" + data[1:]
        for convert in (made.to_connect_data, lambda topic, one: made.to_connect_values(topic, [one, one])):
            with pytest.raises(DataError, match="magic byte"):
                convert("t", wrong)
        assert made.to_connect_values("t", [data, wrong]) is None
        assert made.to_connect_values("t", [None, data]) is made.to_connect_values("t", []) is None


async def test_fastavro_reads_what_is_written() -> None:
    """fastavro reads the bytes after the five-byte prefix with the registered schema."""
    async with schema_registry() as registry:
        schema = Schema.struct("a.B", Field("n", INT64), Field("s", OPTIONAL_STRING))
        made = converter(registry)
        data = await fetching(lambda: made.from_connect_data("t", schema, {"n": 3, "s": None}))
        assert data is not None
        parsed = fastavro.parse_schema(
            {"type": "record", "name": "B", "namespace": "a", "fields": [
                {"name": "n", "type": "long"}, {"name": "s", "type": ["null", "string"]}]}
        )  # fmt: skip
        assert fastavro.schemaless_reader(io.BytesIO(data[5:]), parsed, None) == {"n": 3, "s": None}


async def test_a_time_without_a_zone_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A datetime without a time zone is written as UTC in every time zone of the machine, and rounded down to ms."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        schema = Schema.array(timestamp_schema(optional=True))
        given = [dt.datetime(2024, 1, 1, 12), dt.datetime(1969, 12, 31, 23, 59, 59, 999_500, dt.UTC), None]
        async with schema_registry() as registry:
            made = converter(registry)
            data = await fetching(lambda: made.from_connect_data("t", schema, given))
            _, found = await fetching(lambda: made.to_connect_data("t", data))
        assert found == [given[0].replace(tzinfo=dt.UTC), given[1].replace(microsecond=999_000), None]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("value", [Decimal("1.5"), Decimal(-7), Decimal(9) ** 200, Decimal((1, (1, 2) * 60, -100))])
@pytest.mark.parametrize(("precision", "scale"), [(64, 127), (None, 127), (3, 100), (110, 100)])
async def test_the_precision_of_a_decimal_is_no_limit(precision: int | None, scale: int, value: Decimal) -> None:
    """A decimal may have more digits than its precision. The precision may be less than the scale, or missing.

    Confluent's converter writes a precision of 64 with any scale.
    """
    avro: dict[str, Any] = {"type": "bytes", "logicalType": "decimal", "scale": scale}
    avro |= {} if precision is None else {"precision": precision}
    async with schema_registry() as registry:
        id = registry.add("t-value", avro)
        made = converter(registry, auto_register_schemas="false", use_latest_version="true")
        unscaled = decimal_to_bytes(value, scale)
        encoded = io.BytesIO()
        fastavro.schemaless_writer(encoded, "bytes", unscaled)
        data = framed(id, encoded.getvalue())
        schema, found = await fetching(lambda: made.to_connect_data("t", data))
        assert (found, schema) == (value, from_avro(avro))
        assert await fetching(lambda: made.from_connect_data("t", schema, value)) == data


async def test_a_decimal_may_have_a_scale_above_the_default_precision() -> None:
    """A Connect Decimal with a scale of more than 64 is written with the precision 64, as by Confluent's converter."""
    schema = decimal_schema(127)
    assert to_avro(schema)["precision"] == 64
    async with schema_registry() as registry:
        made = converter(registry)
        data = await fetching(lambda: made.from_connect_data("t", schema, Decimal("1.5")))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (schema, Decimal("1.5"))


async def test_a_date_has_no_time_of_day() -> None:
    """A datetime where the schema is a Date is a DataError: its time of day would be lost."""
    async with schema_registry() as registry:
        made = converter(registry)
        with pytest.raises(DataError, match="is not a Date"):
            await fetching(lambda: made.from_connect_data("t", date_schema(), dt.datetime(2024, 1, 1, 12)))


async def test_null_is_null() -> None:
    """A tombstone stays null with and without a schema; a missing field with a default is written as the default."""
    async with schema_registry() as registry:
        made = converter(registry)
        assert made.from_connect_data("t", None, None) is None
        assert made.from_connect_data("t", OPTIONAL_STRING, None) is None
        assert made.to_connect_data("t", None) == (None, None)
        left = Schema.struct("R", Field("left", Schema(SchemaType.INT32, default=7)))
        data = await fetching(lambda: made.from_connect_data("t", left, {}))
        assert (await fetching(lambda: made.to_connect_data("t", data)))[1] == {"left": 7}


@pytest.mark.parametrize(
    "schema",
    [
        Schema(SchemaType.BYTES, default=b"\xff"),
        Schema(SchemaType.INT32, optional=True, default=7),
        decimal_schema(2, optional=True, default=Decimal("1.50")),
        Schema.array(BYTES, default=[b"\xff"]),
        Schema.array(decimal_schema(2), default=[Decimal("1.50")]),
        Schema.array(Schema.array(OPTIONAL_STRING), default=[["a", None]]),
        Schema.map(STRING, date_schema(), default={"a": dt.date(2024, 1, 2)}),
        Schema.map(INT32, time_schema(), default={7: dt.time(1, 2)}),
        Schema.map(date_schema(), INT32, default={dt.date(2024, 1, 2): 7}),
        Schema.struct("In", Field("day", date_schema(optional=True)), default={"day": None}),
    ],
)
async def test_defaults_are_kept(schema: Schema) -> None:
    """A missing or null field is written with its default. The schema read back has the default."""
    async with schema_registry() as registry:
        made = converter(registry)
        outer = Schema.struct("R", Field("field", schema))
        data = await fetching(lambda: made.from_connect_data("t", outer, {}))
        assert made.from_connect_data("t", outer, {"field": None}) == data
        read, value = await fetching(lambda: made.to_connect_data("t", data))
        assert value == {"field": schema.default}
        field = read.field("field")
        assert field is not None
        assert field.schema.default == schema.default


async def test_a_default_of_another_type_is_ignored() -> None:
    """A schema may have a field whose default is of another type. The default is ignored, in both directions."""
    fields = [
        ("note", "string", None, "a"),
        ("tags", {"type": "array", "items": "string"}, None, ["a"]),
        ("n", "long", "0", 5),
        ("u", ["null", "long"], "0", 5),
        ("price", {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}, 0, Decimal("1.50")),
    ]
    avro = {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": of, "default": default} for name, of, default, _ in fields],
    }
    value = {name: value for name, _, _, value in fields}
    async with schema_registry() as registry:
        registry.add("t-value", avro)
        made = converter(registry, auto_register_schemas="false", use_latest_version="true")
        plain = from_avro({**avro, "fields": [{"name": name, "type": of} for name, of, _, _ in fields]})
        data = await fetching(lambda: made.from_connect_data("t", plain, value))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (plain, value)
        made = converter(registry)
        whole = Schema.struct("a.P", Field("price", Schema(SchemaType.FLOAT64, doc="x", default=0)))
        data = await fetching(lambda: made.from_connect_data("p", whole, {"price": 1.5}))
        assert await fetching(lambda: made.to_connect_data("p", data)) == (whole, {"price": 1.5})


@pytest.mark.parametrize(
    ("avro", "schema"),
    [
        ({"type": "string", "logicalType": "date"}, STRING),
        ({"type": "long", "logicalType": "date"}, INT64),
        ({"type": "long", "logicalType": "time-millis"}, INT64),
        ({"type": "int", "logicalType": "timestamp-millis"}, INT32),
        ({"type": "string", "logicalType": "decimal", "precision": 5, "scale": 2}, STRING),
        ({"type": "int", "logicalType": "date"}, date_schema()),
        ({"type": "fixed", "name": "F", "size": 4, "logicalType": "decimal", "precision": 64}, decimal_schema(0)),
    ],
)
def test_a_logical_type_of_another_avro_type_is_ignored(avro: Any, schema: Schema) -> None:
    """As Avro requires, a logical type counts only with the Avro type that carries it."""
    assert from_avro(avro) == schema


async def test_a_null_struct_gets_no_defaults() -> None:
    """An optional struct that is null stays null, although its field has a default."""
    inner = Schema.struct("In", Field("left", Schema(SchemaType.INT32, default=7)), optional=True)
    outer = Schema.struct("R", Field("inner", inner))
    async with schema_registry() as registry:
        made = converter(registry)
        for given, wanted in (({}, None), ({"inner": None}, None), ({"inner": {}}, {"left": 7})):
            data = await fetching(lambda given=given: made.from_connect_data("t", outer, given))  # type: ignore[misc]
            assert await fetching(lambda data=data: made.to_connect_data("t", data)) == (outer, {"inner": wanted})  # type: ignore[misc]


async def test_a_map_with_optional_text_keys_is_an_array_of_entries() -> None:
    """A key of a map may be null if the map's keys are optional text: the map is an array of entries."""
    schema = Schema.map(OPTIONAL_STRING, INT32)
    value = {"a": 1, None: 2}
    assert to_avro(schema)["type"] == "array"
    async with schema_registry() as registry:
        made = converter(registry)
        data = await fetching(lambda: made.from_connect_data("t", schema, value))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (schema, value)


async def test_an_array_of_entries_with_text_keys_stays_an_array() -> None:
    """An array of entries whose keys are text is read as an array, since a map with such keys is Avro's own map."""
    entry = Schema.struct("io.confluent.connect.avro.MapEntry", Field("key", STRING), Field("value", INT32))
    avro = to_avro(Schema.array(entry)) | {"connect.type": "map"}
    value = [{"key": "a", "value": 1}]
    async with schema_registry() as registry:
        registry.add("t-value", avro)
        made = converter(registry, auto_register_schemas="false", use_latest_version="true")
        data = await fetching(lambda: made.from_connect_data("t", Schema.array(entry), value))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (Schema.array(entry), value)


async def test_a_default_has_the_defaults_of_its_fields() -> None:
    """A field that a struct's default lacks has its own default there, and null if it is optional."""
    inner = (Field("a", INT32), Field("b", Schema(SchemaType.INT32, default=5)), Field("c", OPTIONAL_STRING))
    outer = Schema.struct("R", Field("field", Schema.struct("In", *inner, default={"a": 1})))
    assert to_avro(outer)["fields"][0]["default"] == {"a": 1, "b": 5, "c": None}
    async with schema_registry() as registry:
        made = converter(registry)
        data = await fetching(lambda: made.from_connect_data("t", outer, {}))
        read, value = await fetching(lambda: made.to_connect_data("t", data))
        assert value == {"field": {"a": 1, "b": 5, "c": None}}
        assert read.fields[0].schema.default == value["field"]


async def test_a_plain_scalar_needs_no_schema() -> None:
    """A primitive without a schema is written with its own type; a dict or a NaN without a schema is an error."""
    async with schema_registry() as registry:
        made = converter(registry, is_key=True)
        data = await fetching(lambda: made.from_connect_data("t", None, "k"))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (OPTIONAL_STRING, "k")
        assert registry.subjects == {"t-key": [1]}
        with pytest.raises(DataError, match="needs a schema"):
            made.from_connect_data("t", None, {"a": 1})
        for decimal in ("NaN", "-Infinity"):
            with pytest.raises(DataError, match=decimal):
                made.from_connect_data("t", None, Decimal(decimal))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (INT32, 1.5),
        (INT32, True),
        (INT8, 300),
        (INT32, 1 << 40),
        (BOOLEAN, "false"),
        (ADDRESS, {"street": "A", "x": 1}),
    ],
)
async def test_values_must_be_of_their_schema(schema: Schema, value: Any) -> None:
    """A value that does not match its schema is a DataError, although fastavro would write another value."""
    async with schema_registry() as registry:
        made = converter(registry)
        with pytest.raises(DataError, match=r"type|no field"):
            await fetching(lambda: made.from_connect_data("t", schema, value))


async def test_values_must_be_of_the_latest_schema() -> None:
    """With `use.latest.version` a value that the registered schema cannot hold is a DataError."""
    async with schema_registry() as registry:
        registry.add("t-value", "int")
        made = converter(registry, auto_register_schemas="false", use_latest_version="true")
        with pytest.raises(DataError, match="type INT32"):
            await fetching(lambda: made.from_connect_data("t", INT64, 1 << 40))


async def test_unions_enums_and_fixed() -> None:
    """A union is a struct with one field set, an enum is a string, a fixed is bytes, and all
    are written back unchanged.
    """
    avro = {
        "type": "record", "name": "Event", "fields": [
            {"name": "what", "type": ["null", "int", "string", {"type": "record", "name": "Sub", "fields": [
                {"name": "x", "type": "int"}]}]},
            {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}},
            {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
            {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        ],
    }  # fmt: skip
    async with schema_registry() as registry:
        id = registry.add("events-value", avro)
        made, back = converter(registry), converter(registry, auto_register_schemas="false", use_latest_version="true")
        parsed = fastavro.parse_schema(avro)
        for what, wanted in (
            (None, None),
            (4, {"int": 4, "string": None, "Sub": None}),
            (("Sub", {"x": 1}), {"int": None, "string": None, "Sub": {"x": 1}}),
        ):
            written = io.BytesIO()
            one = {"what": what, "color": "BLUE", "hash": b"ab", "id": "00000000-0000-0000-0000-000000000001"}
            fastavro.schemaless_writer(written, parsed, one)
            data = framed(id, written.getvalue())
            schema, value = await fetching(lambda data=data: made.to_connect_data("events", data))  # type: ignore[misc]
            assert value == {**one, "what": wanted}
            assert schema is not None
            assert schema.field("what").schema.name == AVRO_UNION  # type: ignore[union-attr]
            assert schema.field("color").schema.parameter(AVRO_ENUM) == "Color"  # type: ignore[union-attr]
            again = await fetching(lambda v=value, s=schema: back.from_connect_data("events", s, v))  # type: ignore[misc]
            assert again == data


ENUM = {"type": "enum", "name": "E", "symbols": ["RED"]}
DAY = {"type": "int", "logicalType": "date"}
MAP = {"type": "map", "values": "string"}
INT_MAP = to_avro(Schema.map(INT32, STRING))
MOMENT = {"type": "long", "logicalType": "timestamp-millis"}


def record_of(**fields: Any) -> dict[str, Any]:
    """The Avro schema of a record A."""
    return {"type": "record", "name": "A", "fields": [{"name": name, "type": of} for name, of in fields.items()]}


@pytest.mark.parametrize(
    ("branches", "branch", "value"),
    [
        (
            ["null", "string", {"type": "array", "items": ["string", "double"]}],
            "array",
            [{"string": "a", "double": None}],
        ),
        (["null", "string", {"type": "map", "values": ["string", "long"]}], "map", {"a": {"string": None, "long": 1}}),
        (["string", record_of(u=["int", "string"])], "A", {"u": {"int": 1, "string": None}}),
        (["double", "long"], "long", 2**53 + 1),
        (["null", "double", "long"], "long", 5),
        (["float", "double"], "double", 1.1),
        (["float", "string"], "float", 21.3),
        (["boolean", "int"], "int", 1),
        ([DAY, MOMENT], "long", dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)),
        ([DAY, MOMENT], "int", dt.date(2024, 1, 1)),
        (["string", ENUM], "E", "RED"),
        (["string", ENUM], "string", "blue"),
        ([ENUM, "string"], "string", "blue"),
        ([{"type": "map", "values": "string"}, record_of(x="string")], "A", {"x": "a"}),
        ([{"type": "map", "values": "string"}, record_of(x="string")], "map", {"y": "a"}),
    ],
)
async def test_a_unions_value_keeps_its_branch(branches: list[Any], branch: str, value: Any) -> None:
    """A union's value is written as the branch that is set, and read back as the same branch."""
    async with schema_registry() as registry:
        registry.add("t-value", branches)
        made = converter(registry, auto_register_schemas="false", use_latest_version="true")
        schema = from_avro(branches)
        given = {field.name: value if field.name == branch else None for field in schema.fields}
        data = await fetching(lambda: made.from_connect_data("t", schema, given))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (schema, given)


@pytest.mark.parametrize(
    ("branches", "default", "branch", "value"),
    [
        (["string", "int"], "abc", "string", "abc"),
        (["string", "int"], 5, "int", 5),
        (["int", "long"], 1 << 40, "long", 1 << 40),
        (["boolean", "int", "null"], True, "boolean", True),
        (["bytes", "int"], "\xff", "bytes", b"\xff"),
        ([DAY, "string"], "abc", "string", "abc"),
        ([ENUM, "string"], "blue", "string", "blue"),
        ([MAP, "string"], "abc", "string", "abc"),
        ([MAP, {"type": "array", "items": MAP}], [], "array", []),
        ([MAP, {"type": "array", "items": MAP}], [{"x": "y"}], "array", [{"x": "y"}]),
        ([MAP, {"type": "array", "items": MAP}], [{"key": "x", "value": "y"}], "array", [{"key": "x", "value": "y"}]),
        ([record_of(x="string"), record_of(y="int") | {"name": "B"}], {"y": 1}, "B", {"y": 1}),
        (
            [record_of(x=INT_MAP), record_of(x={"type": "array", "items": MAP}) | {"name": "B"}],
            {"x": [{"y": "z"}]},
            "B",
            {"x": [{"y": "z"}]},
        ),
        ([record_of(u=["int", "string"]), "string"], {"u": "a"}, "A", {"u": {"int": None, "string": "a"}}),
    ],
)
async def test_the_default_of_a_union_is_kept(branches: list[Any], default: Any, branch: str, value: Any) -> None:
    """A union's default sets the first branch that it matches. It is written for a missing or null field."""
    avro = {"type": "record", "name": "R", "fields": [{"name": "u", "type": branches, "default": default}]}
    async with schema_registry() as registry:
        registry.add("t-value", avro)
        made = converter(registry, auto_register_schemas="false", use_latest_version="true")
        schema = from_avro(avro)
        union = schema.fields[0].schema
        assert union.default == {field.name: value if field.name == branch else None for field in union.fields}
        data = await fetching(lambda: made.from_connect_data("t", Schema.struct("R"), {}))
        assert await fetching(lambda: made.to_connect_data("t", data)) == (schema, {"u": union.default})
        assert made.from_connect_data("t", Schema.struct("R"), {"u": None}) == data
    assert from_avro(to_avro(schema)) == schema
    assert to_avro(schema)["fields"][0]["default"] == default
    assert ("null" in branches) == (to_avro(schema)["fields"][0]["type"][-1] == "null")


async def test_a_repeated_enum_becomes_its_name() -> None:
    """Avro defines an enum once. Two enums with one name and other symbols cannot be written."""
    color = {"type": "enum", "name": "Color", "namespace": "a", "symbols": ["RED", "BLUE"]}
    fields = [
        {"name": "color", "type": color},
        {"name": "back", "type": "a.Color"},
        {"name": "what", "type": ["null", "int", "a.Color"], "default": None},
    ]
    schema = from_avro({"type": "record", "name": "a.Car", "fields": fields})
    assert to_avro(schema)["fields"] == fields
    assert [field.name for field in schema.fields[2].schema.fields] == ["int", "Color"]
    async with schema_registry() as registry:
        made = converter(registry)
        value = {"color": "RED", "back": "BLUE", "what": {"int": None, "Color": "BLUE"}}
        data = await fetching(lambda: made.from_connect_data("cars", schema, value))
        assert await fetching(lambda: made.to_connect_data("cars", data)) == (schema, value)
    other = replace(schema.fields[0].schema, parameters=((AVRO_ENUM, "a.Color"), (f"{AVRO_ENUM}.RED", "RED")))
    with pytest.raises(DataError, match=r"a\.Color"):
        to_avro(Schema.struct("a.Car", schema.fields[0], Field("back", other)))


async def test_references_are_followed() -> None:
    """A schema may refer to a schema of another subject."""
    async with schema_registry() as registry:
        registry.add(
            "sub", {"type": "record", "name": "Sub", "namespace": "a", "fields": [{"name": "x", "type": "int"}]}
        )
        reference = {"name": "a.Sub", "subject": "sub", "version": 1}
        outer = {"type": "record", "name": "Out", "namespace": "b", "fields": [{"name": "s", "type": "a.Sub"}]}
        id = registry.add("out-value", outer, references=[reference])
        data = framed(id, b"\x06")
        made = converter(registry)
        schema, value = await fetching(lambda: made.to_connect_data("out", data))
        assert value == {"s": {"x": 3}}
        assert schema is not None
        assert schema.field("s").schema == Schema.struct("a.Sub", Field("x", INT32))  # type: ignore[union-attr]


def test_a_union_of_types_with_one_simple_name_is_an_error() -> None:
    """The struct of a union has one field for each simple name, so a value's branch would be ambiguous."""
    union = [{"type": "record", "name": f"com.v{n}.Order", "fields": []} for n in (1, 2)]
    with pytest.raises(DataError, match="Order"):
        from_avro(["null", *union])


@pytest.mark.parametrize("data", [b"", b"\x01\x00\x00\x00\x01x", b"\x00\x00\x00", b"text"])
async def test_bytes_without_an_id_are_an_error(data: bytes) -> None:
    """Bytes that do not begin with a zero byte and an id are a DataError."""
    async with schema_registry() as registry:
        with pytest.raises(DataError, match="Unknown magic byte!"):
            converter(registry).to_connect_data("t", data)


async def test_invalid_bytes_values_and_schemas_are_data_errors() -> None:
    """Truncated bytes, extra bytes, values of another type and invalid schemas are DataErrors."""
    async with schema_registry() as registry:
        made = converter(registry)
        id = registry.add("t-value", "string")
        for encoded in (b"\x0aab", b"\x02aa", b""):
            with pytest.raises(DataError, match="topic t"):
                await fetching(lambda encoded=encoded: made.to_connect_data("t", framed(id, encoded)))  # type: ignore[misc]
        with pytest.raises(DataError, match="type INT64"):
            await fetching(lambda: made.from_connect_data("t", Schema.struct("R", Field("n", INT64)), {"n": "x"}))
        for wrong in (
            Schema.struct("R", Field("a b", INT64)),
            Schema.struct("R", Field("a", Schema.struct("S")), Field("b", Schema.struct("S", Field("x", INT64)))),
        ):
            with pytest.raises(DataError):
                await fetching(lambda wrong=wrong: made.from_connect_data("t", wrong, {}))  # type: ignore[misc]
        by_array = Schema.map(Schema.array(INT64), STRING)
        entries = registry.add("m-value", to_avro(by_array))
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, to_avro(by_array), [{"key": [1], "value": "a"}])
        with pytest.raises(DataError, match="plain value"):
            await fetching(lambda: made.to_connect_data("t", framed(entries, buffer.getvalue())))
        nested = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}
        own = registry.add("n-value", nested)
        with pytest.raises(DataError, match="refers to itself"):
            await fetching(lambda: made.to_connect_data("t", framed(own, b"\x00")))


def test_settings_are_checked() -> None:
    """The registry's URL is required, a user needs a password, and `use.latest.version` excludes registering."""
    for settings, message in (
        ({}, "schema.registry.url"),
        ({"schema.registry.url": "http://x", "basic.auth.credentials.source": "USER_INFO"}, "user:password"),
        ({"schema.registry.url": "http://x", "use.latest.version": "true"}, "auto.register.schemas"),
        ({"schema.registry.url": "http://x", "value.subject.name.strategy": "Mine"}, "value.subject.name.strategy"),
    ):
        with pytest.raises(ConfigError, match=message):
            AvroConverter().configure(settings, False)
    assert avro_library() is fastavro


def schemas() -> st.SearchStrategy[tuple[Schema, Any]]:
    """Schemas, each with a value."""
    leaves = st.one_of(
        st.integers(-(2**63), 2**63 - 1).map(lambda n: (INT64, n)),
        st.text().map(lambda text: (STRING, text)),
        st.binary().map(lambda data: (BYTES, data)),
        st.floats(allow_nan=False).map(lambda number: (FLOAT64, number)),
        st.floats(allow_nan=False, width=32).map(lambda number: (FLOAT32, as_float32(number))),
        st.integers(-(10**20), 10**20).map(lambda n: (decimal_schema(3), Decimal(n).scaleb(-3))),
        st.dates(dt.date(1900, 1, 1)).map(lambda day: (date_schema(), day)),
    )

    def larger(inner: st.SearchStrategy[tuple[Schema, Any]]) -> st.SearchStrategy[tuple[Schema, Any]]:
        return st.one_of(
            inner.map(lambda one: (one[0].as_optional(), one[1])),
            inner.map(lambda one: (one[0].as_optional(), None)),
            inner.map(lambda one: (Schema.array(one[0]), [one[1], one[1]])),
            inner.map(lambda one: (Schema.map(STRING, one[0]), {"k": one[1]})),
            inner.map(lambda one: (Schema.map(INT64, one[0]), {5: one[1]})),
            inner.map(lambda one: (Schema.map(FLOAT32, one[0]), {21.3: one[1]})),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda many: (
                    Schema.struct(None, *(Field(f"f{at}", one[0]) for at, one in enumerate(many))),
                    {f"f{at}": one[1] for at, one in enumerate(many)},
                )
            ),
        )

    return st.recursive(leaves, larger, max_leaves=5)


@given(schemas())
def test_every_value_round_trips(case: tuple[Schema, Any]) -> None:
    """Every value of a schema is read back unchanged, and so is the schema."""
    schema, value = case
    avro = to_avro(schema)
    parsed = fastavro.parse_schema(for_fastavro(avro))
    buffer = io.BytesIO()
    change = change_to_avro(schema)
    fastavro.schemaless_writer(buffer, parsed, change(value) if change else value)
    buffer.seek(0)
    found = from_avro(avro)
    back = change_from_avro(found)
    read = fastavro.schemaless_reader(buffer, parsed, None, return_record_name=True, return_record_name_override=True)
    assert (found, back(read) if back else read) == (schema, value)

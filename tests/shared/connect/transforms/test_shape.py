"""ExtractField, HoistField, Flatten, ReplaceField and ValueToKey, with and without schemas."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.schema import INT32, OPTIONAL_INT32, STRING, Field, Schema, SchemaType
from penstock.shared.connect.transforms.shape import (
    ExtractFieldKey,
    ExtractFieldValue,
    FlattenValue,
    HoistFieldValue,
    ReplaceFieldValue,
    ValueToKey,
    field_path,
)
from tests.shared.connect.transforms.transforming import applied, configured, record

INNER = Schema.struct(None, Field("n", INT32), optional=True)
OUTER = Schema.struct("S", Field("id", STRING), Field("inner", INNER))
DEFAULTED = Schema(SchemaType.INT32, optional=True, default=42)


def test_a_field_is_extracted() -> None:
    """The field replaces the value; a missing one is null without a schema and a DataError with one."""
    assert applied(ExtractFieldValue, {"a": 1}, field="a").value == 1
    assert applied(ExtractFieldValue, {"a": 1}, field="b").value is None
    assert applied(ExtractFieldValue, None, field="a").value is None
    found = applied(ExtractFieldValue, {"id": "x", "inner": None}, OUTER, field="id")
    assert (found.value, found.value_schema) == ("x", STRING)
    with pytest.raises(DataError, match="Unknown field: nope"):
        applied(ExtractFieldValue, {"id": "x"}, OUTER, field="nope")
    key = configured(ExtractFieldKey, field="k").apply(record(key={"k": 5}))
    assert key is not None
    assert key.key == 5


def test_v2_paths() -> None:
    """Under V2 dots descend into structs and maps, and backticks escape them."""
    more = {"field_syntax_version": "V2"}
    assert applied(ExtractFieldValue, {"a": {"b.c": 3}}, field="a.`b.c`", **more).value == 3
    assert applied(ExtractFieldValue, {"id": "x", "inner": {"n": 4}}, OUTER, field="inner.n", **more).value == 4


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a", ["a"]),
        ("`a`", ["a"]),
        ("`a.b`", ["a.b"]),
        ("``.a", ["", "a"]),
        ("a.", ["a", ""]),
        ("`a`.", ["a", ""]),
        (".a..b", ["", "a", "", "b"]),
        ("a`b.c", ["a`b", "c"]),
        ("`a`b.c`.d", ["a`b.c", "d"]),
        ("`a\\`b`", ["a\\`b"]),  # needs no escape, so the backslash is itself
        ("`a\\`.b`.c", ["a`.b", "c"]),
    ],
)
def test_v2_paths_are_split_as_in_kafka(path: str, names: list[str]) -> None:
    """Dots, backticks and backslashes have the meaning of Kafka's SingleFieldPath."""
    assert field_path(path, "V2") == tuple(names)


@pytest.mark.parametrize("path", ["`", "a.`b", "`a`b", "`a\\`", "`a`b.c"])
def test_an_open_backtick_is_a_config_error(path: str) -> None:
    """A name that begins with a backtick must end with one."""
    with pytest.raises(ConfigError, match="backtick"):
        field_path(path, "V2")


def test_a_name_that_begins_with_a_backtick() -> None:
    """The advice of the error works: another pair of backticks encloses such a name."""
    assert field_path("a.``b`.`c`", "V2") == ("a", "`b", "c")


def test_null_becomes_the_default() -> None:
    """A null becomes the schema's default unless `replace.null.with.default` is false."""
    schema = Schema.struct(None, Field("a", DEFAULTED))
    assert applied(ExtractFieldValue, {"a": None}, schema, field="a").value == 42
    off = {"replace_null_with_default": "false"}
    assert applied(ExtractFieldValue, {"a": None}, schema, field="a", **off).value is None


def test_a_value_is_hoisted() -> None:
    """The whole value becomes a field."""
    assert applied(HoistFieldValue, 5, field="n").value == {"n": 5}
    found = applied(HoistFieldValue, 5, INT32, field="n")
    assert found.value_schema == Schema.struct(None, Field("n", INT32))


def test_nesting_is_flattened() -> None:
    """Names are joined, fields below optional structs are optional, and arrays are unchanged."""
    assert applied(FlattenValue, {"a": {"b": {"c": 1}}, "d": [1]}).value == {"a.b.c": 1, "d": [1]}
    found = applied(FlattenValue, {"id": "x", "inner": None}, OUTER, delimiter="_")
    assert found.value == {"id": "x", "inner_n": None}
    assert found.value_schema == Schema.struct("S", Field("id", STRING), Field("inner_n", OPTIONAL_INT32))
    with pytest.raises(DataError, match="Only Map objects"):
        applied(FlattenValue, 5)


def test_fields_are_replaced() -> None:
    """Exclude overrides include, and renames come last."""
    given = {"a": 1, "b": 2, "c": 3}
    assert applied(ReplaceFieldValue, given, exclude="a").value == {"b": 2, "c": 3}
    assert applied(ReplaceFieldValue, given, include="a,b", exclude="b").value == {"a": 1}
    assert applied(ReplaceFieldValue, given, include="a", renames="a:x").value == {"x": 1}
    found = applied(ReplaceFieldValue, {"id": "x", "inner": None}, OUTER, exclude="inner", renames="id:key")
    assert (found.value, found.value_schema) == ({"key": "x"}, Schema.struct("S", Field("key", STRING)))
    with pytest.raises(ConfigError, match="Invalid rename mapping"):
        applied(ReplaceFieldValue, given, renames="a")


def test_the_key_is_made_of_fields_of_the_value() -> None:
    """The key has the listed fields in order; a missing one is null or, with a schema, a DataError."""
    assert applied(ValueToKey, {"a": 1, "b": 2}, fields="b,z").key == {"b": 2, "z": None}
    found = applied(ValueToKey, {"id": "x", "inner": None}, OUTER, fields="id")
    assert (found.key, found.key_schema) == ({"id": "x"}, Schema.struct(None, Field("id", STRING)))
    with pytest.raises(DataError, match="exist: z"):
        applied(ValueToKey, {"id": "x"}, OUTER, fields="z")

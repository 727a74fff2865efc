"""Definitions of settings: types, validators with Kafka's messages, defaults, secrets and recommended values."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.config_def import (
    NO_DEFAULT,
    ConfigDef,
    Importance,
    Password,
    Recommender,
    Type,
    Width,
    as_text,
    at_least,
    non_empty_without_control_characters,
    one_of,
    parse,
    regex,
)
from penstock.shared.connect.connector import SinkConnector
from penstock.shared.connect.connectors.files import FilesSinkConnector
from penstock.shared.connect.connectors.http import HttpSinkConnector
from penstock.shared.connect.connectors.postgres.sink import PostgresSinkConnector
from penstock.shared.connect.runtime.connector_config import validate_unique_aliases

HIGH = Importance.HIGH


def definition() -> ConfigDef:
    return (
        ConfigDef()
        .define("size", Type.INT, "5", HIGH, "How much.", at_least(1), group="G", order=1, width=Width.SHORT)
        .define("secret", Type.PASSWORD, None, HIGH, "A secret.")
        .define("topic", Type.STRING, NO_DEFAULT, HIGH, "Where to.", dependents=("size",))
    )


@pytest.mark.parametrize("connector", [HttpSinkConnector, FilesSinkConnector, PostgresSinkConnector])
def test_a_delay_of_retries_is_positive(connector: type[SinkConnector]) -> None:
    """A backoff of 0 is rejected: the worker would use its default for it, as Kafka Connect does."""
    props = {"http.url": "http://host/", "url": "s3://bucket/folder", "connection.url": "postgresql://host/x"}
    assert connector.config().parse({**props, "retry.backoff.ms": "1"})["retry.backoff.ms"] == 1
    with pytest.raises(ConfigError, match=r"retry\.backoff\.ms"):
        connector.config().parse({**props, "retry.backoff.ms": "0"})


def test_defaults_are_parsed() -> None:
    """A default is parsed by the setting's type, and a given value overrides it."""
    assert definition().parse({"topic": "t"}) == {"size": 5, "secret": None, "topic": "t"}
    assert definition().parse({"topic": " t ", "size": "7"})["size"] == 7


def test_a_password_is_trimmed() -> None:
    """A password is trimmed as any other setting: a file with a secret often ends with a newline."""
    assert definition().parse({"topic": "t", "secret": " s3cret\n"})["secret"].value == "s3cret"


def test_an_internal_setting_is_parsed() -> None:
    """An internal setting is parsed and validated as any other, and is not in the documentation."""
    internal = definition().define("internal.size", Type.INT, 1, HIGH, "Size.", at_least(1), internal=True)
    assert internal.parse({"topic": "t", "internal.size": "5"})["internal.size"] == 5
    assert internal.parse({"topic": "t"})["internal.size"] == 1
    with pytest.raises(ConfigError, match=r"internal\.size"):
        internal.parse({"topic": "t", "internal.size": "0"})
    assert [shown["name"] for shown in internal.definitions()] == ["size", "secret", "topic"]


def test_all_errors_are_reported_together() -> None:
    """Parsing reports all invalid settings in one error."""
    with pytest.raises(ConfigError, match=r"at least 1.*\"topic\""):
        definition().parse({"size": "0"})


def test_secrets_are_hidden() -> None:
    """A password's value is never shown."""
    (shown,) = [one for one in definition().validate({"secret": "s3cret"}) if one["value"]["name"] == "secret"]
    assert shown["value"]["value"] == "[hidden]"
    assert definition().parse({"secret": "s3cret", "topic": "t"})["secret"].value == "s3cret"


def test_definitions_are_shown_whole() -> None:
    """A definition contains all members that REST shows."""
    assert definition().definitions()[0] == {
        "name": "size",
        "type": "INT",
        "required": False,
        "default_value": "5",
        "importance": "HIGH",
        "documentation": "How much.",
        "group": "G",
        "width": "SHORT",
        "display_name": "size",
        "dependents": [],
        "order": 1,
    }
    assert definition().definitions()[2]["required"] is True
    assert definition().definitions()[2]["dependents"] == ["size"]


def test_recommenders_see_all_values() -> None:
    """A recommender determines recommended values and visibility from all values."""
    offered = Recommender(lambda _name, values: [values["size"]], lambda _name, values: values["size"] > 5)
    more = definition().define("other", Type.INT, 1, HIGH, "", recommender=offered)
    value = more.validate({"topic": "t", "size": "9"})[-1]["value"]
    assert value["recommended_values"] == ["9"]
    assert value["visible"] is True
    assert more.validate({"topic": "t"})[-1]["value"]["visible"] is False


def test_definitions_are_embedded_under_a_prefix() -> None:
    """An embedded definition has prefixed names, its group and its order."""
    outer = ConfigDef().embed("transforms.x.", "Transforms: x", definition(), 3)
    assert outer.names() == ("transforms.x.size", "transforms.x.secret", "transforms.x.topic")
    assert outer["transforms.x.topic"].dependents == ("transforms.x.size",)
    assert outer["transforms.x.topic"].order == 5
    assert outer.groups() == ["Transforms: x"]


def test_a_recommender_of_an_embedded_definition_sees_its_own_settings() -> None:
    """A recommender gets the name and the values of its own definition, without the prefix."""
    own = Recommender(lambda name, values: [name, *values], lambda name, values: values[name] < values["size"])
    inner = definition().define("other", Type.INT, 1, HIGH, "", recommender=own)
    outer = ConfigDef().define("size", Type.INT, 0, HIGH, "").embed("a.", "A", ConfigDef().embed("b.", "B", inner))
    value = outer.validate({"a.b.topic": "t"})[-1]["value"]
    assert value["recommended_values"] == ["other", "size", "secret", "topic", "other"]
    assert value["visible"] is True


def test_a_setting_is_defined_once() -> None:
    """Defining a setting twice is an error."""
    with pytest.raises(ConfigError, match="size is defined twice"):
        definition().define("size", Type.INT, 1, HIGH, "")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Type.INT, "-2147483648", -(1 << 31)),
        (Type.SHORT, "32767", 32767),
        (Type.LONG, "9223372036854775807", (1 << 63) - 1),
        (Type.DOUBLE, "1.5", 1.5),
        (Type.BOOLEAN, "TRUE", True),
        (Type.LIST, "a , b", ["a", "b"]),
        (Type.LIST, "", []),
        (Type.STRING, " x ", "x"),
        (Type.CLASS, "a.B", "a.B"),
    ],
)
def test_text_becomes_a_value(kind: Type, text: str, value: object) -> None:
    """Each type parses its text."""
    assert parse("x", kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Type.INT, "2147483648", "Not a number of type INT"),
        (Type.SHORT, "32768", "Not a number of type SHORT"),
        (Type.LONG, "1.0", "Not a number of type LONG"),
        (Type.DOUBLE, "much", "Not a number of type DOUBLE"),
        (Type.BOOLEAN, "yes", "Expected value to be either true or false"),
    ],
)
def test_invalid_values_are_errors(kind: Type, text: str, message: str) -> None:
    """An invalid value is a ConfigError with the value, the setting and the reason."""
    with pytest.raises(ConfigError, match=f" {text} .*x: {message}$"):
        parse("x", kind, text)


def test_classes_must_exist() -> None:
    """An unknown class is a ConfigError."""
    with pytest.raises(ConfigError, match=r"a\.B"):
        parse("x", Type.CLASS, "a.B", lambda _name: None)


def test_values_as_text() -> None:
    """Values are shown as in Java, and passwords are hidden."""
    assert [as_text(v, None) for v in (True, None, ["a", 1], 5)] == ["true", None, "a,1", "5"]
    assert as_text("x", Type.PASSWORD) == as_text(Password("x"), None) == "[hidden]"
    assert f"{Password('x')!r}{Password('x')}" == "[hidden][hidden]"


def test_validators() -> None:
    """Each validator accepts valid values and rejects invalid ones."""
    at_least(1)("x", 1)
    one_of("a", "b", ignore_case=True)("x", "A")
    non_empty_without_control_characters("x", None)
    regex("x", "a.*")
    validate_unique_aliases("x", ["a", "b"])
    for validator, value, message in (
        (at_least(1), 0, "at least 1"),
        (at_least(1), None, "non-null"),
        (one_of("a", "b"), "A", "String must be one of: a, b"),
        (non_empty_without_control_characters, "", "may not be empty"),
        (non_empty_without_control_characters, "a\x00", "control sequences"),
        (regex, "(", "must be a regular expression"),
        (validate_unique_aliases, ["a", "a"], "Duplicate alias"),
    ):
        with pytest.raises(ConfigError, match=message):
            validator("x", value)

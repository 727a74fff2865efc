"""Types of settings and their validation, with Kafka's messages."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.config_def import (
    Password,
    Type,
    as_text,
    between,
    non_empty_without_control_characters,
    one_of,
    parse,
    regex,
)
from penstock.shared.connect.runtime.connector_config import validate_unique_aliases


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
    between(1, 3)("x", 3)
    one_of("a", "b", ignore_case=True)("x", "A")
    non_empty_without_control_characters("x", None)
    regex("x", "a.*")
    validate_unique_aliases("x", ["a", "b"])
    for validator, value, message in (
        (between(1, 3), 4, "no more than 3"),
        (between(1, 3), None, "non-null"),
        (one_of("a", "b"), "A", "String must be one of: a, b"),
        (non_empty_without_control_characters, "", "may not be empty"),
        (non_empty_without_control_characters, "a\x00", "control sequences"),
        (regex, "(", "must be a regular expression"),
        (validate_unique_aliases, ["a", "a"], "Duplicate alias"),
    ):
        with pytest.raises(ConfigError, match=message):
            validator("x", value)

"""Definitions of settings: defaults, errors, secrets and recommended values."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Recommender, Type, Width, at_least

HIGH = Importance.HIGH


def definition() -> ConfigDef:
    return (
        ConfigDef()
        .define("size", Type.INT, "5", HIGH, "How much.", at_least(1), group="G", order=1, width=Width.SHORT)
        .define("secret", Type.PASSWORD, None, HIGH, "A secret.")
        .define("topic", Type.STRING, NO_DEFAULT, HIGH, "Where to.", dependents=("size",))
    )


def test_defaults_are_parsed() -> None:
    """A default is parsed by the setting's type, and a given value overrides it."""
    assert definition().parse({"topic": "t"}) == {"size": 5, "secret": None, "topic": "t"}
    assert definition().parse({"topic": " t ", "size": "7"})["size"] == 7


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


def test_a_setting_is_defined_once() -> None:
    """Defining a setting twice is an error."""
    with pytest.raises(ConfigError, match="size is defined twice"):
        definition().define("size", Type.INT, 1, HIGH, "")

"""Definitions of settings."""

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
    """A default given as text is of the setting's type, and what is given outweighs it."""
    assert definition().parse({"topic": "t"}) == {"size": 5, "secret": None, "topic": "t"}
    assert definition().parse({"topic": " t ", "size": "7"})["size"] == 7


def test_all_that_is_wrong_is_said_at_once() -> None:
    """Parsing says every wrong setting in one error."""
    with pytest.raises(ConfigError, match=r"Value must be at least 1; Missing required configuration \"topic\""):
        definition().parse({"size": "0"})


def test_secrets_are_hidden() -> None:
    """A password's value is never shown."""
    (shown,) = [one for one in definition().validate({"secret": "s3cret"}) if one["value"]["name"] == "secret"]
    assert shown["value"]["value"] == "[hidden]"
    assert definition().parse({"secret": "s3cret", "topic": "t"})["secret"].value == "s3cret"


def test_definitions_are_shown_whole() -> None:
    """Everything that REST shows of a setting is in its definition."""
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
    """What a form may offer can depend on the other settings, and so can whether it shows the setting."""
    offered = Recommender(lambda _name, values: [values["size"]], lambda _name, values: values["size"] > 5)
    more = definition().define("other", Type.INT, 1, HIGH, "", recommender=offered)
    value = more.validate({"topic": "t", "size": "9"})[-1]["value"]
    assert value["recommended_values"] == ["9"]
    assert value["visible"] is True
    assert more.validate({"topic": "t"})[-1]["value"]["visible"] is False


def test_definitions_are_embedded_under_a_prefix() -> None:
    """A transform's settings stand under its name, in its group."""
    outer = ConfigDef().embed("transforms.x.", "Transforms: x", definition(), 3)
    assert outer.names() == ("transforms.x.size", "transforms.x.secret", "transforms.x.topic")
    assert outer["transforms.x.topic"].dependents == ("transforms.x.size",)
    assert outer["transforms.x.topic"].order == 5
    assert outer.groups() == ["Transforms: x"]


def test_a_setting_is_defined_once() -> None:
    """Two definitions of one name are a mistake of the author's."""
    with pytest.raises(ConfigError, match="size is defined twice"):
        definition().define("size", Type.INT, 1, HIGH, "")

"""The chain of transforms: order, predicates, drops."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.transformation_chain import TransformationChain
from tests.shared.connect.transforms.transforming import record

HOIST = "org.apache.kafka.connect.transforms.HoistField$Value"
PROPS = {
    "transforms": "one,two",
    "transforms.one.type": HOIST,
    "transforms.one.field": "a",
    "transforms.two.type": "penstock.connect.transforms.HoistFieldValue",
    "transforms.two.field": "b",
}


def chain(**more: str) -> TransformationChain:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return TransformationChain.of(Plugins.installed(), {**PROPS, **named})


def test_transforms_are_applied_in_order() -> None:
    """By Kafka's class names and ours."""
    found = chain().apply(record(1))
    assert found is not None
    assert found.value == {"b": {"a": 1}}


def test_a_predicate_says_which_records_a_transform_concerns() -> None:
    """Those of which it is true, or false where it is negated."""
    bound = {
        "predicates": "gone",
        "predicates__gone__type": "RecordIsTombstone",
        "transforms__one__predicate": "gone",
        "transforms__one__negate": "true",
        "transforms__two__type": "Filter",
        "transforms__two__predicate": "gone",
    }
    made = chain(**bound)
    assert made.apply(record(None)) is None
    passed = made.apply(record(1))
    assert passed is not None
    assert passed.value == {"a": 1}
    assert chain(**bound, transforms__two__negate="true").apply(record(1)) is None
    made.close()


def test_what_does_not_exist_is_refused() -> None:
    """A class or a predicate that nobody knows."""
    with pytest.raises(ConfigError, match=r"Class no\.Such could not be found"):
        chain(transforms__one__type="no.Such")
    with pytest.raises(ConfigError, match="not among those"):
        chain(transforms__one__predicate="nope")

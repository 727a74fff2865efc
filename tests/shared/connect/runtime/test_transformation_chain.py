"""The chain of transforms: order, predicates and dropped records."""

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
    """Transforms are applied in order, with Kafka's or our class names."""
    found = chain().apply(record(1))
    assert found is not None
    assert found.value == {"b": {"a": 1}}


def test_predicates_select_records() -> None:
    """A transform applies to records for which its predicate is true, or false if negated."""
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


def test_unknown_classes_and_predicates_are_errors() -> None:
    """An unknown class or predicate is a ConfigError."""
    with pytest.raises(ConfigError, match=r"no\.Such"):
        chain(transforms__one__type="no.Such")
    with pytest.raises(ConfigError, match="listed in 'predicates'"):
        chain(transforms__one__predicate="nope")

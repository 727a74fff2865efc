"""The public module names of classes and functions."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, get_type_hints

import msgspec
import pydantic
import pytest

from penstock.shared.common.public_names import publish

SOURCE = '''
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

class Plain:
    """
    >>> 1
    1
    """

    def method(self):
        """
        >>> 2
        2
        """

class Resolved:
    other: Plain

@dataclass
class WithFields:
    other: Mapping[str, int]

class Pair(NamedTuple):
    other: Mapping[str, int]

def function():
    """
    >>> 3
    3
    """

constant = 5
'''


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A private module, like one of Penstock's."""
    module = ModuleType("penstock.shared.made_up")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(module))
    return module


def taken(private: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(private, name) for name in names}


def test_classes_and_functions_get_the_public_name(private: ModuleType) -> None:
    """Classes and functions have the public module as `__module__`, and constants are unchanged."""
    members = taken(private, "Plain", "Resolved", "function", "constant")
    publish("penstock.made_up", members, list(members))
    assert {each.__module__ for name, each in members.items() if name != "constant"} == {"penstock.made_up"}


def test_decoders_find_the_types_of_fields(private: ModuleType) -> None:
    """Types of a dataclass's fields are resolved although the public module does not have their names."""
    members = taken(private, "WithFields")
    publish("penstock.streams", members, ["WithFields"])
    each = members["WithFields"]
    assert get_type_hints(each) == {"other": Mapping[str, int]}
    assert msgspec.json.decode(b'{"other": {"a": 1}}', type=each) == each({"a": 1})
    assert pydantic.TypeAdapter(each).validate_json(b'{"other": {"a": 1}}') == each({"a": 1})
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str`"):
        msgspec.json.decode(b'{"other": {"a": "b"}}', type=each)


def test_a_named_tuple_resolves(private: ModuleType) -> None:
    """Annotations of a named tuple, which are `ForwardRef`s, are resolved."""
    members = taken(private, "Pair")
    publish("penstock.streams", members, ["Pair"])
    assert get_type_hints(members["Pair"]) == {"other": Mapping[str, int]}


def test_an_annotation_may_name_what_the_public_module_has(private: ModuleType) -> None:
    """An annotation may use a name of the public module."""
    exec("class Needs:\n    other: Elsewhere\n", vars(private))
    members = {**taken(private, "Needs"), "Elsewhere": int}
    publish("penstock.streams", members, ["Needs"])
    assert get_type_hints(members["Needs"]) == {"other": int}


def test_an_unresolvable_annotation_is_an_error(private: ModuleType) -> None:
    """An annotation with an unknown name is a NameError when it is published, not later in a user's program."""
    exec("class Lost:\n    other: Nowhere\n", vars(private))
    with pytest.raises(NameError, match="Nowhere"):
        publish("penstock.streams", taken(private, "Lost"), ["Lost"])


def test_the_first_public_name_stays(private: ModuleType) -> None:
    """A class that is published twice keeps its first public module."""
    members = taken(private, "Plain")
    publish("penstock.made_up", members, ["Plain"])
    publish("penstock.second", members, ["Plain"])
    assert members["Plain"].__module__ == "penstock.made_up"


def test_doctest_finds_the_examples_of_what_is_published(private: ModuleType) -> None:
    """Doctest finds the examples of published classes and methods in their private module, once each."""
    found = [test for test in doctest.DocTestFinder().find(private) if test.examples]
    members = taken(private, "Plain", "function")
    publish("penstock.made_up", members, list(members))
    again = [test for test in doctest.DocTestFinder().find(private) if test.examples]
    assert len(again) == len(found) == 3

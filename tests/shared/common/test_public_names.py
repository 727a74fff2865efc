"""Names that classes and functions say of themselves."""

from __future__ import annotations

import doctest
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from penstock.shared.common.public_names import FIELDS, PRIVATE, publish

SOURCE = '''
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass

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

class WithHints:
    other: Mapping[str, int]

@dataclass
class Unresolved:
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
    """A private module, as a file of ours would make it."""
    module = ModuleType("penstock.shared.made_up")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(module))
    return module


def taken(private: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(private, name) for name in names}


def test_classes_and_functions_get_the_public_name(private: ModuleType) -> None:
    """A class and a function say the module that they are published in; a constant says nothing."""
    members = taken(private, "Plain", "Resolved", "function", "constant")
    publish("penstock.made_up", members, list(members))
    assert {each.__module__ for name, each in members.items() if name != "constant"} == {"penstock.made_up"}


def test_fields_that_would_not_resolve_keep_the_private_name(private: ModuleType) -> None:
    """`Mapping` is not in the public module, so a decoder of the dataclass would fail there."""
    members = taken(private, "Unresolved")
    publish("penstock.made_up", members, ["Unresolved"])
    assert members["Unresolved"].__module__ == "penstock.shared.made_up"


def test_annotations_that_are_no_fields_do_not_matter(private: ModuleType) -> None:
    """Nothing resolves those of a plain class, such as the base of processors."""
    members = taken(private, "WithHints")
    publish("penstock.made_up", members, ["WithHints"])
    assert members["WithHints"].__module__ == "penstock.made_up"


@pytest.mark.parametrize("public", ["clients", "streams", "connect", "testing", "errors"])
def test_classes_of_public_modules_say_their_public_name(public: str) -> None:
    """All but those whose annotations are fields."""
    module = import_module(f"penstock.{public}")
    classes = [each for name in module.__all__ if isinstance(each := getattr(module, name), type)]
    private = [each for each in classes if each.__module__.startswith(PRIVATE)]
    assert [each for each in private if not any(hasattr(each, mark) for mark in FIELDS)] == []
    assert len(classes) > len(private)


def test_the_first_public_name_stays(private: ModuleType) -> None:
    """What a second public module shows too is named after the first."""
    members = taken(private, "Plain")
    publish("penstock.made_up", members, ["Plain"])
    publish("penstock.second", members, ["Plain"])
    assert members["Plain"].__module__ == "penstock.made_up"


def test_doctest_finds_the_examples_of_what_is_published(private: ModuleType) -> None:
    """A published class's examples, its methods' too, are found in the module that it lies in, once each."""
    found = [test for test in doctest.DocTestFinder().find(private) if test.examples]
    members = taken(private, "Plain", "function")
    publish("penstock.made_up", members, list(members))
    again = [test for test in doctest.DocTestFinder().find(private) if test.examples]
    assert len(again) == len(found) == 3

"""Names that classes and functions say of themselves."""

from __future__ import annotations

import doctest
import sys
from types import ModuleType
from typing import Any

import pytest

from penstock.shared.common.public_names import publish

SOURCE = '''
from __future__ import annotations
from collections.abc import Mapping

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


def test_a_class_whose_annotations_would_not_resolve_keeps_its_name(private: ModuleType) -> None:
    """`Mapping` is not in the public module, so get_type_hints would fail there."""
    members = taken(private, "Unresolved")
    publish("penstock.made_up", members, ["Unresolved"])
    assert members["Unresolved"].__module__ == "penstock.shared.made_up"


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

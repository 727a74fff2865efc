"""Jars fetched once per user."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from shared.common.ivy import JarSet, JarsUnavailable, cache_root, explain_ivy, fetch_jars, ivy_module, ivy_settings

WANTED = JarSet("Thing 1", "thing-1", (("org.a", "b_2.13", "1"),), 1 << 20, (("org.c", "*"),))


def test_a_folder_that_is_there_is_taken_without_java_or_network(tmp_path: Path) -> None:
    """What was fetched once is never fetched again."""
    (tmp_path / "penstock" / "thing-1").mkdir(parents=True)
    assert fetch_jars("no-java", WANTED, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "penstock" / "thing-1"


def test_the_cache_follows_xdg_where_it_is_absolute() -> None:
    """A relative XDG_CACHE_HOME is ignored, as its specification says."""
    assert cache_root({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/penstock")
    assert cache_root({"XDG_CACHE_HOME": "c", "HOME": "/h"}) == Path("/h/.cache/penstock")


def test_what_ivy_is_told() -> None:
    """The module asks for the artifacts and leaves out the excluded; the settings name one repository with a slash."""
    module = ElementTree.fromstring(ivy_module(WANTED))
    assert [d.attrib["name"] for d in module.iter("dependency")] == ["b_2.13"]
    assert [e.attrib for e in module.iter("exclude")] == [{"org": "org.c", "module": "*"}]
    assert 'root="http://m/"' in ivy_settings("http://m", Path("/c"))


def test_a_repository_that_lacks_it_is_explained() -> None:
    """What could not be had is named, with where it was looked for."""
    said = explain_ivy("\t\t:: org.a#b_2.13;1: not found", WANTED, "http://m", "/c")
    assert said is not None
    assert said.startswith("Thing 1 must be downloaded once, and org.a:b_2.13:1 could not be had from http://m")
    assert explain_ivy("all is well", WANTED, "http://m", "/c") is None


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    """A file in the cache's place is an error that names the folder and the way out."""
    (tmp_path / "penstock").write_text("")
    with pytest.raises(JarsUnavailable, match="set XDG_CACHE_HOME"):
        fetch_jars("java", WANTED, {"XDG_CACHE_HOME": str(tmp_path)})

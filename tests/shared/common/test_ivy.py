"""What is asked of Ivy, and what its answers mean. (Real downloads: tests/integration/test_kafka_jars.py.)"""

from __future__ import annotations

import os
import pwd
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.ivy import (
    LOCK_FILE,
    JarSet,
    announcement,
    cache_root,
    explain_ivy,
    fetch_jars,
    ivy_jar,
    ivy_module,
    ivy_settings,
)

WANTED = JarSet("Thing 1", "thing-1", (("org.a", "b_2.13", "1"), ("org.d", "e", "2")), 1 << 20, (("org.c", "*"),))
NO_JAVA = Path("/nonexistent/java")
UNREACHABLE = """\
:: problems summary ::
:::: WARNINGS
\t\tmodule not found: org.a#b_2.13;1
\t\t::::::::::::::::::::::::::::::::::::::::::::::
\t\t:: org.a#b_2.13;1: not found
\t\t:: org.d#e;2: not found
:::: ERRORS
\tServer access error at url http://127.0.0.1:9/x.pom (java.net.ConnectException: Connection refused)
"""
BROKEN_DOWNLOAD = "\t\t[FAILED     ] org.scala-lang#scala-library;2.13.16!scala-library.jar: invalid sha1 (1200ms)\n"


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"XDG_CACHE_HOME": "/var/cache/me", "HOME": "/home/me"}, "/var/cache/me/penstock"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/penstock"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/penstock"),
        ({"HOME": "/home/me"}, "/home/me/.cache/penstock"),
    ],
)
def test_cache_is_where_the_xdg_specification_says(environ: dict[str, str], root: str) -> None:
    """XDG_CACHE_HOME when it is absolute, else ~/.cache."""
    assert cache_root(environ) == Path(root)


def test_an_empty_home_is_not_the_root_folder() -> None:
    """Without HOME the cache is in the user's own folder, as the system knows it."""
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache/penstock"
    assert cache_root({"HOME": ""}) == cache_root({}) == own


def test_a_download_is_announced_where_there_is_one(tmp_path: Path) -> None:
    """What, from where, to where; nothing where the jars are there."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert announcement(WANTED, environ) == f"downloading Thing 1 from Maven Central into {tmp_path}/penstock/thing-1"
    (tmp_path / "penstock/thing-1").mkdir(parents=True)
    assert announcement(WANTED, environ) is None


def test_a_folder_that_is_there_is_taken_without_java_or_network(tmp_path: Path) -> None:
    """What was fetched once is never fetched again."""
    (tmp_path / "penstock" / "thing-1").mkdir(parents=True)
    assert fetch_jars(NO_JAVA, WANTED, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "penstock" / "thing-1"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the cache's place is an error with the folder and the setting that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JarsUnavailable, match=r"file/penstock cannot be written .*set XDG_CACHE_HOME"):
        fetch_jars(NO_JAVA, WANTED, {"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    """Where less than the jars need is free, the message says how much there is and how much it takes."""
    huge = JarSet("Thing 1", "thing-1", WANTED.artifacts, 1 << 60)
    with pytest.raises(
        JarsUnavailable, match=r"no space for the jars of Thing 1: .* MiB free, 1099511627776 MiB needed"
    ):
        fetch_jars(NO_JAVA, huge, {"XDG_CACHE_HOME": str(tmp_path)})


def test_a_java_that_does_not_start_is_named(tmp_path: Path) -> None:
    """The launcher's path is in the message, and nothing half-made stays behind."""
    with pytest.raises(JarsUnavailable, match="Thing 1 could not be downloaded: the Java launcher /nonexistent/java"):
        fetch_jars(NO_JAVA, WANTED, {"XDG_CACHE_HOME": str(tmp_path)})
    assert [entry.name for entry in (tmp_path / "penstock").iterdir()] == [LOCK_FILE]


def test_a_download_that_is_not_wanted_any_more_is_given_up(tmp_path: Path) -> None:
    """Once `stop` is set, nothing goes on in the background."""
    stop = threading.Event()
    stop.set()
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\nsleep 600\n")
    java.chmod(0o755)
    with pytest.raises(JarsUnavailable, match="the download of Thing 1 was given up"):
        fetch_jars(java, WANTED, {"XDG_CACHE_HOME": str(tmp_path)}, stop=stop)


def test_ivy_comes_with_pyspark() -> None:
    """The jar that resolves the others is the one in pyspark's own folder."""
    assert ivy_jar().is_file()
    assert ivy_jar().parent.parent.name == "pyspark"


def test_ivy_is_asked_for_every_artifact_but_what_is_excluded() -> None:
    """The module file is well formed, names what is wanted in its version, and what is not to be followed."""
    module = ElementTree.fromstring(ivy_module(WANTED))
    assert tuple((d.attrib["org"], d.attrib["name"], d.attrib["rev"]) for d in module.iter("dependency")) == (
        WANTED.artifacts
    )
    assert [e.attrib for e in module.iter("exclude")] == [{"org": "org.c", "module": "*"}]


@pytest.mark.parametrize("mirror", ["https://mirror/maven?a=1&b=2", "https://mirror/maven/"])
def test_mirror_and_cache_reach_ivy_whatever_their_characters(mirror: str) -> None:
    """The settings stay well formed for an address or folder with characters that XML reserves."""
    settings = ElementTree.fromstring(ivy_settings(mirror, Path('/home/"me" & <you>/ivy')))
    assert settings.find("resolvers/ibiblio").get("root") == mirror.rstrip("/") + "/"  # type: ignore[union-attr]
    assert settings.find("caches").get("defaultCacheDir") == '/home/"me" & <you>/ivy'  # type: ignore[union-attr]


def test_without_a_mirror_ivy_takes_the_repository_that_it_knows() -> None:
    """No root is named: Ivy's default for a Maven layout holds, which is Maven Central."""
    resolver = ElementTree.fromstring(ivy_settings(None, Path("/c"))).find("resolvers/ibiblio")
    assert resolver is not None
    assert resolver.attrib == {"name": "maven", "m2compatible": "true"}


def test_unreachable_repository_is_said_with_what_is_lacking() -> None:
    """Artifacts, repository and the way out are in the message."""
    said = explain_ivy(UNREACHABLE, WANTED, "http://127.0.0.1:9/", "/cache")
    assert said is not None
    assert said.startswith("Thing 1 must be downloaded once, and org.a:b_2.13:1, org.d:e:2 could not be had from http")
    assert "from http://127.0.0.1:9/: the repository cannot be reached" in said
    assert "PENSTOCK_MAVEN_REPOSITORY" in said
    assert "had from Maven Central:" in str(explain_ivy(UNREACHABLE, WANTED, None, "/cache"))


def test_broken_download_is_said() -> None:
    """A jar whose checksum is wrong counts as lacking."""
    said = explain_ivy(BROKEN_DOWNLOAD, WANTED, None, "/cache")
    assert "org.scala-lang:scala-library:2.13.16 could not be had" in str(said)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("java.io.IOException: No space left on device", "no space left on the disk of /cache"),
        ("java.io.FileNotFoundException: /cache/x (Permission denied)", "/cache cannot be written"),
    ],
)
def test_trouble_with_the_disk_is_said(output: str, words: str) -> None:
    """What Ivy says of its own cache is said of our folder."""
    assert words in str(explain_ivy(output, WANTED, None, "/cache"))


def test_good_run_needs_no_explanation() -> None:
    """Ivy's usual report, evictions included, is no failure."""
    report = ":: evicted modules:\n\torg.slf4j#slf4j-api;1.7.2 by [org.slf4j#slf4j-api;1.7.36]"
    assert explain_ivy(report, WANTED, None, "c") is None

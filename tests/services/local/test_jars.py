"""What is asked of Ivy, and what its answers mean. (Real downloads: tests/integration/test_kafka_jars.py.)"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from services.local.jars import (
    ARTIFACTS,
    JarsUnavailable,
    cache_root,
    explain_ivy,
    ivy_jar,
    ivy_module,
    ivy_settings,
    kafka_jars,
)
from services.local.java import Java

NO_JAVA_NEEDED = Java(Path("/nonexistent/java"), 17, "PATH")
UNREACHABLE = """\
:: problems summary ::
:::: WARNINGS
\t\tmodule not found: org.apache.kafka#kafka_2.13;4.1.1
\t\t::::::::::::::::::::::::::::::::::::::::::::::
\t\t:: org.apache.kafka#kafka_2.13;4.1.1: not found
\t\t:: org.apache.logging.log4j#log4j-slf4j-impl;2.24.3: not found
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


async def test_jars_that_are_there_are_not_downloaded(tmp_path: Path) -> None:
    """A folder in the cache is used as it is; no Java is run."""
    folder = tmp_path / "penstock" / "kafka-4.1.1"
    folder.mkdir(parents=True)
    assert await kafka_jars(NO_JAVA_NEEDED, {"XDG_CACHE_HOME": str(tmp_path)}) == folder


async def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error has the folder and the setting that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JarsUnavailable, match=r"file/penstock cannot be written .*set XDG_CACHE_HOME"):
        await kafka_jars(NO_JAVA_NEEDED, {"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_ivy_comes_with_pyspark() -> None:
    """The jar that resolves Kafka is the one in pyspark's own folder."""
    assert ivy_jar().is_file()
    assert ivy_jar().parent.parent.name == "pyspark"


def test_ivy_is_asked_for_every_artifact() -> None:
    """The module file is well formed and names what is wanted in its version."""
    wanted = [(d.get("org"), d.get("name"), d.get("rev")) for d in ET.fromstring(ivy_module()).iter("dependency")]
    assert wanted == list(ARTIFACTS)


@pytest.mark.parametrize("repository", ["https://mirror/maven?a=1&b=2", "https://mirror/maven/"])
def test_mirror_and_cache_reach_ivy_whatever_their_characters(repository: str) -> None:
    """The settings stay well formed for an address or folder with characters that XML reserves."""
    settings = ET.fromstring(ivy_settings(repository, Path('/home/"me" & <you>/ivy')))
    assert settings.find("resolvers/ibiblio").get("root") == repository.rstrip("/") + "/"  # type: ignore[union-attr]
    assert settings.find("caches").get("defaultCacheDir") == '/home/"me" & <you>/ivy'  # type: ignore[union-attr]


def test_unreachable_repository_is_said_with_what_is_lacking() -> None:
    """Artifacts, repository and the way out are in the message."""
    said = explain_ivy(UNREACHABLE, "http://127.0.0.1:9/", "/cache")
    assert said is not None
    assert "org.apache.kafka:kafka_2.13:4.1.1, org.apache.logging.log4j:log4j-slf4j-impl:2.24.3 could not" in said
    assert "from http://127.0.0.1:9/: the repository cannot be reached" in said
    assert "PENSTOCK_MAVEN_REPOSITORY" in said


def test_broken_download_is_said() -> None:
    """A jar whose checksum is wrong counts as lacking."""
    assert "org.scala-lang:scala-library:2.13.16 could not be had" in str(explain_ivy(BROKEN_DOWNLOAD, "r", "/cache"))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("java.io.IOException: No space left on device", "no space left on the disk of /cache"),
        ("java.io.FileNotFoundException: /cache/x (Permission denied)", "/cache cannot be written"),
    ],
)
def test_trouble_with_the_disk_is_said(output: str, words: str) -> None:
    """What Ivy says of its own cache is said of our folder."""
    assert words in str(explain_ivy(output, "r", "/cache"))


def test_good_run_needs_no_explanation() -> None:
    """Ivy's usual report, evictions included, is no failure."""
    assert (
        explain_ivy(":: evicted modules:\n\torg.slf4j#slf4j-api;1.7.2 by [org.slf4j#slf4j-api;1.7.36]", "r", "c")
        is None
    )

"""Kafka Streams in the benchmark of sessions: its requirements and the message if one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import _kafka_streams
from penstock.shared.common.java.jars import cache_root

VERSION = "4.1.1"


def test_the_jars_are_of_one_version() -> None:
    """Kafka Streams and its client have the expected version, and RocksDB is among the jars."""
    names = {jar.name for jar in _kafka_streams.JARS.jars}
    assert {f"kafka-streams-{VERSION}.jar", f"kafka-clients-{VERSION}.jar"} <= names
    assert any(name.startswith("rocksdbjni-") for name in names)


async def test_a_launcher_without_jdk_or_jars_returns_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a JDK, or without jars and a repository, the launcher returns the reason and no command."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.15\"' >&2\n", encoding="utf-8")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    launch = await _kafka_streams.launcher()
    assert isinstance(launch, str)
    assert "install a JDK" in launch

    (java.parent / "javac").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_MAVEN_REPOSITORY", "http://127.0.0.1:9")
    launch = await _kafka_streams.launcher()
    assert isinstance(launch, str)
    assert "Kafka Streams" in launch

    folder = cache_root() / _kafka_streams.JARS.folder
    folder.mkdir(parents=True, exist_ok=True)
    for jar in _kafka_streams.JARS.jars:
        with (folder / jar.name).open("wb") as file:
            file.truncate(jar.size)
    launch = await _kafka_streams.launcher()
    assert launch[0] == str(java)
    assert launch[-1] == str(_kafka_streams.SOURCE)


async def test_the_command_has_the_benchmark_settings(tmp_path: Path) -> None:
    """The program gets the gap, the grace, the commit interval, the number of records, and Kafka's name of the
    guarantee."""
    seen = tmp_path / "seen"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" > {seen}\necho \'{{"records_per_second": 7}}\'\n', encoding="utf-8")
    program.chmod(0o755)
    given = ([str(program)], "here:1", "clicks", "exactly_once", 200, 500)
    assert await _kafka_streams.session_count("kafka streams, x", *given) == {"records_per_second": 7}
    *arguments, _ = seen.read_text(encoding="utf-8").split()
    expected = "here:1 clicks kafka-streams-x exactly_once_v2 1800000 300000 200 500 500"
    assert arguments == expected.split()

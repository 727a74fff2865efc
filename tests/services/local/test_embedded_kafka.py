"""EmbeddedKafka before a broker is started, and the command lines of its JVMs.

tests/integration/test_embedded_kafka.py has the tests with a broker.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from penstock.services.local.broker_config import EmbeddedKafkaSettings, broker_archive_path
from penstock.services.local.embedded_kafka import (
    EmbeddedKafka,
    broker_command,
    format_storage_command,
    new_cluster_id,
)
from penstock.shared.common.errors import ConfigError, IllegalState, JarsUnavailable
from penstock.shared.common.java import installed_java
from penstock.shared.common.java.installed_java import Java

JAVA = Java(Path("/usr/bin/java"), 17, "PATH")


def test_the_address_before_the_start_is_an_error(tmp_path: Path) -> None:
    """Before the start the address and `pause` are IllegalState."""
    kafka = EmbeddedKafka(tmp_path)
    with pytest.raises(IllegalState):
        _ = kafka.bootstrap_servers
    with pytest.raises(IllegalState):
        kafka.pause()
    assert "not started" in repr(kafka)


async def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    """A stop without a start does nothing."""
    kafka = EmbeddedKafka(tmp_path / "kafka")
    await kafka.stop()
    assert not (tmp_path / "kafka").exists()


async def test_missing_java_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Java the data folder is not created."""
    monkeypatch.setattr(installed_java, "_LINUX_FOLDER", tmp_path / "jvm")
    with pytest.raises(installed_java.JavaNotFound):
        await EmbeddedKafka(tmp_path / "kafka", environ={"PATH": ""}).start()
    assert not (tmp_path / "kafka").exists()


async def test_missing_jars_are_an_error_before_anything_is_written(tmp_path: Path) -> None:
    """Without a writable cache of jars the data folder is not created."""
    (tmp_path / "java").write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    (tmp_path / "java").chmod(0o755)
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "java")}
    with pytest.raises(JarsUnavailable, match="cannot be written"):
        await EmbeddedKafka(tmp_path / "kafka", environ=environ).start()
    assert not (tmp_path / "kafka").exists()


def test_cluster_ids_are_kafkas_uuids() -> None:
    """A cluster id is 16 bytes in 22 characters of URL-safe base64, and usable as a command-line argument."""
    ids = {new_cluster_id() for _ in range(300)}
    assert len(ids) == 300
    assert all(len(i) == 22 and not i.startswith("-") and len(base64.urlsafe_b64decode(i + "==")) == 16 for i in ids)


def test_heap_is_bounded_and_options_are_passed() -> None:
    """The heap's limit and the user's options precede the class on the command line."""
    settings = EmbeddedKafkaSettings(heap_mb=300, jvm_options=("-Dx=y",))
    command = broker_command(JAVA, Path("/jars"), settings)
    assert command[:2] == ["/usr/bin/java", "-Xmx300m"]
    assert command.index("-Dx=y") < command.index("kafka.Kafka")
    assert "/jars/*" in command


def test_a_broker_uses_the_class_archive_that_is_there(tmp_path: Path) -> None:
    """No option names a missing file. Both the broker and the formatting use an existing one."""
    jars = tmp_path / "kafka-4.1.1"
    archive = broker_archive_path(JAVA, jars)
    commands = (broker_command(JAVA, jars, EmbeddedKafkaSettings()), format_storage_command(JAVA, jars, "id"))
    assert not any("SharedArchiveFile" in word for command in commands for word in command)
    archive.touch()
    option = f"-XX:SharedArchiveFile={archive}"
    assert option in broker_command(JAVA, jars, EmbeddedKafkaSettings())
    assert option in format_storage_command(JAVA, jars, "id")


def test_class_path_cannot_hold_a_colon() -> None:
    """A cache folder with a colon is a ConfigError."""
    with pytest.raises(ConfigError, match="/odd:place"):
        format_storage_command(JAVA, Path("/odd:place"), "id")

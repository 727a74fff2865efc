"""EmbeddedKafka before a broker is started; tests/integration/test_embedded_kafka.py has the tests with a broker."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from penstock.services.local.embedded_kafka import EmbeddedKafka, new_cluster_id
from penstock.shared.common.errors import IllegalState, JarsUnavailable
from penstock.shared.common.java import installed_java


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

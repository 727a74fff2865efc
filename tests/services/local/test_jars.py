"""Kafka's jars. (What fetches them: tests/shared/common/test_ivy.py and tests/integration/test_kafka_jars.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.local.jars import KAFKA_JARS, KAFKA_VERSION, kafka_jars
from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.java import Java

NO_JAVA_NEEDED = Java(Path("/nonexistent/java"), 17, "PATH")


def test_the_folder_names_the_version() -> None:
    """Another version of Kafka is another folder, so that an upgrade fetches it."""
    assert KAFKA_VERSION in KAFKA_JARS.folder
    assert ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION) in KAFKA_JARS.artifacts


async def test_jars_that_are_there_are_not_downloaded(tmp_path: Path) -> None:
    """A folder in the cache is used as it is; no Java is run."""
    folder = tmp_path / "penstock" / "kafka-4.1.1"
    folder.mkdir(parents=True)
    assert await kafka_jars(NO_JAVA_NEEDED, {"XDG_CACHE_HOME": str(tmp_path)}) == folder


async def test_a_failed_download_is_raised_to_the_caller(tmp_path: Path) -> None:
    """What goes wrong in the thread reaches the one who awaits."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JarsUnavailable, match="file/penstock cannot be written"):
        await kafka_jars(NO_JAVA_NEEDED, {"XDG_CACHE_HOME": str(tmp_path / "file")})

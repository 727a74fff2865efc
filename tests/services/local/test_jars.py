"""Kafka's jars. (What fetches them: tests/shared/common/test_jars.py and tests/integration/test_kafka_jars.py.)"""

from __future__ import annotations

from penstock.services.local.jars import KAFKA_JARS, KAFKA_VERSION


def test_the_lock_is_of_the_version() -> None:
    """Another version of Kafka is another folder, so that an upgrade fetches it, and its own jars are all of it."""
    assert KAFKA_JARS.folder == f"kafka-{KAFKA_VERSION}"
    assert f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}" in KAFKA_JARS.roots
    own = [jar.path.split("/") for jar in KAFKA_JARS.jars if jar.path.startswith("org/apache/kafka/")]
    assert {version for *_, version, _ in own} == {KAFKA_VERSION}
    assert {"kafka_2.13", "kafka-clients", "kafka-server"} <= {name for *_, name, _, _ in own}


def test_logging_has_one_binding() -> None:
    """Kafka's jars ask for slf4j 1.7, and exactly one binding for it is among them."""
    names = [jar.name for jar in KAFKA_JARS.jars]
    assert [name for name in names if name.startswith("slf4j-api-")] == ["slf4j-api-1.7.36.jar"]
    assert sum("slf4j" in name for name in names) == 2
    assert any(name.startswith("log4j-slf4j-impl-") for name in names)

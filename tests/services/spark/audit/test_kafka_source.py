"""The properties of Spark's Kafka source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.services.spark.audit.kafka_source import count_records, java_client_properties
from penstock.shared.common.settings import KafkaSettings


def test_names_and_passwords_are_javas_as_they_are() -> None:
    """JAAS reads quotes and backslashes as JSON does, but has no escapes for other characters."""
    secured = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}
    kafka = KafkaSettings.model_validate({**secured, "sasl_username": "jürgen", "sasl_password": 'pä"ss\\€'})
    assert java_client_properties(kafka)["sasl.jaas.config"].endswith(
        'PlainLoginModule required username="jürgen" password="pä\\"ss\\\\€";'
    )


def test_java_client_properties(tmp_path: Path) -> None:
    """PEM files and passwords become properties of the Java client, with quotes escaped."""
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"-- {name} --")
    kafka = KafkaSettings(
        bootstrap_servers="b:1",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="ann",
        sasl_password='se"cret',  # type: ignore[arg-type]
        ssl_cafile=tmp_path / "ca",
        ssl_certfile=tmp_path / "cert",
        ssl_keyfile=tmp_path / "key",
    )
    got = java_client_properties(kafka)
    assert got["sasl.jaas.config"].endswith('ScramLoginModule required username="ann" password="se\\"cret";')
    assert (got["ssl.truststore.location"], got["ssl.keystore.key"]) == (str(tmp_path / "ca"), "-- key --")
    assert java_client_properties(KafkaSettings(bootstrap_servers="b:1"))["security.protocol"] == "PLAINTEXT"


def test_without_offsets_to_read_no_job_counts_records() -> None:
    """Then the function needs no Spark session."""
    no_session: Any = None
    assert count_records(no_session, KafkaSettings(), "topic", {0: 5, 1: 0}, {0: 5, 1: 0}) == 0

"""The inputs of an audit: its settings, Spark's Kafka source, and the fields that it reads from source values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.services.spark.audit.audit import run_audit
from penstock.services.spark.audit.kafka_source import count_records, java_client_properties
from penstock.services.spark.audit.measures import OTHER, TEXT, MeasuredField, _value_parser
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.errors import SparkFailed
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings

NEEDED = ("--application=a", "--lake=l")


def test_a_sample_of_no_key_is_rejected() -> None:
    """A share that rounds to zero would compare nothing and is rejected. The smallest valid share is accepted."""
    for share in ("1e-7", "0"):
        with pytest.raises(ConfigError, match="sample"):
            AuditSettings.load([*NEEDED, "--sample", share])
    assert AuditSettings.load([*NEEDED, "--sample", "0.000001"]).sample == 1e-6


class EndedSession:
    """A Spark session whose JVM has ended: Py4J cannot connect to it."""

    def __getattr__(self, _: str) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")


def test_an_ended_jvm_is_an_error_of_spark(tmp_path: Path) -> None:
    """`penstock audit` knows SparkFailed, and ends with the status of an audit that could not be carried out."""
    (tmp_path / "a").mkdir()
    session: Any = EndedSession()
    with pytest.raises(SparkFailed, match="JVM ended"):
        run_audit(session, AuditSettings(application="a", lake=str(tmp_path)), print)


def test_a_login_that_java_lacks_is_rejected() -> None:
    """OAUTHBEARER tokens come from a Python function, so it is rejected.

    Every other mechanism, and none, is accepted.
    """
    secured = [*NEEDED, "--kafka.security-protocol=SASL_SSL", "--kafka.sasl-username=u", "--kafka.sasl-password=p"]
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        kafka = AuditSettings.load([*secured, "--kafka.sasl-mechanism", mechanism], environ={}).kafka
        assert kafka.sasl_mechanism == mechanism
    assert AuditSettings.load(NEEDED, environ={}).kafka.sasl_mechanism is None
    tokens = ["--kafka.sasl-mechanism=OAUTHBEARER", "--kafka.sasl-oauth-token-provider=tokens:give"]
    with pytest.raises(ConfigError, match=r"kafka.*OAUTHBEARER.*Java"):
        AuditSettings.load([*secured, *tokens], environ={})


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
        (tmp_path / name).write_text(f"{name}: BEGIN PRIVATE KEY")
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
    assert (got["ssl.truststore.location"], got["ssl.keystore.key"]) == (
        str(tmp_path / "ca"),
        "key: BEGIN PRIVATE KEY",
    )
    assert java_client_properties(KafkaSettings(bootstrap_servers="b:1"))["security.protocol"] == "PLAINTEXT"


def test_a_certificate_file_may_have_the_key(tmp_path: Path) -> None:
    """Without `ssl_keyfile` the key is read from the file of the certificate, as in Penstock's own clients."""
    (tmp_path / "both").write_text(both := "BEGIN CERTIFICATE, BEGIN PRIVATE KEY")
    got = java_client_properties(KafkaSettings(security_protocol="SSL", ssl_certfile=tmp_path / "both"))
    assert {got["ssl.keystore.certificate.chain"], got["ssl.keystore.key"]} == {both}


@pytest.mark.parametrize("kind", ["RSA ", "EC ", "", "ENCRYPTED "])
def test_a_client_key_is_pkcs8(tmp_path: Path, kind: str) -> None:
    """Java reads no other form. Its password is passed only for an encrypted key, since Java would use it."""
    (tmp_path / "both").write_text(f"-----BEGIN CERTIFICATE-----\n-----BEGIN {kind}PRIVATE KEY-----\n")
    given = {"security_protocol": "SSL", "ssl_certfile": tmp_path / "both", "ssl_key_password": "s3cret"}
    kafka = KafkaSettings.model_validate(given)
    if kind in ("RSA ", "EC "):
        with pytest.raises(ConfigError, match=f"ssl_keyfile: {tmp_path}/both has no PKCS#8 key .*openssl pkcs8"):
            java_client_properties(kafka)
    else:
        assert ("ssl.key.password" in java_client_properties(kafka)) == bool(kind)


def test_without_offsets_to_read_no_job_counts_records() -> None:
    """Then the function needs no Spark session."""
    no_session: Any = None
    assert count_records(no_session, KafkaSettings(), "topic", {0: 5, 1: 0}, {0: 5, 1: 0}) == 0


WANTED = [
    MeasuredField("n", "int64"),
    MeasuredField("x", "float64"),
    MeasuredField("page", TEXT),
    MeasuredField("page", OTHER),
]


def parsed(*values: bytes | None) -> list[tuple[object, ...]]:
    offsets = pa.array(range(len(values)), pa.int64())
    batch = pa.RecordBatch.from_arrays([offsets, pa.array(values, pa.binary())], ["offset", "value"])
    (found,) = _value_parser(WANTED)(iter([batch]))
    assert found.schema.names == ["offset", "fields"]
    return [tuple(row[field.column] for field in WANTED) for row in found.column("fields").to_pylist()]


def test_fields_are_read_as_the_engine_adds_them() -> None:
    """Booleans are 1 or 0, texts are no numbers, and a value other than text is seen."""
    assert parsed(
        b'{"n":3,"x":2,"page":"/"}',
        b'{"n":true,"x":0.5}',
        b'{"n":"3","x":"0.5","page":7}',
        b'{"n":9223372036854775808}',
    ) == [(3, 2.0, "/", False), (1, 0.5, None, False), (None, None, None, True), (None, None, None, False)]


@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"[1]", b"5", b'{"page":"\xff"}', b'{"n":' * 100_000, b"[" * 100_000]
)
def test_a_value_that_is_not_an_object_has_no_fields(value: bytes | None) -> None:
    """A dead letter whose value is not a JSON object has no fields, and the audit continues."""
    assert parsed(value, b'{"n":1}') == [(None, None, None, False), (1, None, None, False)]

"""The properties of Spark's Kafka source."""

from __future__ import annotations

from penstock.services.spark.audit.audit_inputs import client_properties
from penstock.shared.common.settings import KafkaSettings


def test_names_and_passwords_are_javas_as_they_are() -> None:
    """JAAS reads quotes and backslashes as JSON does, but has no escapes for other characters."""
    secured = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}
    kafka = KafkaSettings.model_validate({**secured, "sasl_username": "jürgen", "sasl_password": 'pä"ss\\€'})
    assert client_properties(kafka)["sasl.jaas.config"].endswith(
        'PlainLoginModule required username="jürgen" password="pä\\"ss\\\\€";'
    )

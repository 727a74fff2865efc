"""Which of our ways to log in to Kafka its Java client, which Spark has, can go as well."""

from __future__ import annotations

from penstock.shared.common.settings import KafkaSettings


def require_java_login(kafka: KafkaSettings) -> KafkaSettings:
    """`kafka`, where a job of Spark's can log in with it; ValueError for tokens that a function of Python's gives."""
    if kafka.sasl_mechanism == "OAUTHBEARER":
        raise ValueError(
            "sasl_mechanism=OAUTHBEARER is nothing that jobs of Spark's can log in with, since a function of Python's "
            "gives the tokens: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and certificates are"
        )
    return kafka

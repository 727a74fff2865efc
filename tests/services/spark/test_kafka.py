"""What Kafka's Java client raises, as an error of ours that says what to look at."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.services.spark.kafka import _translated, client_properties
from penstock.services.spark.session import causes, last_cause
from penstock.shared.common.errors import (
    AuthenticationFailed,
    BrokerNotAvailable,
    PenstockError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.settings import KafkaSettings

COMMON = "org.apache.kafka.common"


@dataclass
class Throwable:
    """A Java exception as Py4J shows it."""

    text: str
    cause: Throwable | None = None

    def toString(self) -> str:  # noqa: N802 - Java's name
        return self.text

    def getCause(self) -> Throwable | None:  # noqa: N802 - Java's name
        return self.cause


class Raised(Exception):
    """What Py4J raises for it."""

    def __init__(self, *texts: str) -> None:
        super().__init__("an error occurred while calling o1.get\n: and all of Java's stack")
        self.java_exception = None
        for text in reversed(texts):
            self.java_exception = Throwable(text, self.java_exception)


@pytest.mark.parametrize(
    ("texts", "kind", "said"),
    [
        (
            [f"java.util.concurrent.ExecutionException: {COMMON}.errors.UnknownTopicOrPartitionException: no"],
            UnknownTopicOrPartition,
            "there is no topic t",
        ),
        (["java.util.concurrent.TimeoutException"], BrokerNotAvailable, "no answer about t within 7 ms"),
        (
            [f"java.util.concurrent.ExecutionException: {COMMON}.errors.SaslAuthenticationException: bad password"],
            AuthenticationFailed,
            "topic t: bad password",
        ),
        (
            [f"{COMMON}.KafkaException: Failed to create", f"{COMMON}.config.ConfigException: No resolvable urls"],
            BrokerNotAvailable,
            "t cannot be asked about: No resolvable urls",
        ),
    ],
)
def test_each_error_names_broker_and_topic(texts: list[str], kind: type[PenstockError], said: str) -> None:
    """In one line, without the names of Java's classes; the last cause is the one that says why."""
    error = _translated(Raised(*texts), KafkaSettings(bootstrap_servers="b:1"), "t", 7)  # type: ignore[arg-type]
    assert type(error) is kind
    assert str(error).startswith("kafka.bootstrap_servers=b:1")
    assert said in str(error)
    assert "java" not in str(error)
    assert "org." not in str(error)


def test_the_last_cause_that_says_anything() -> None:
    """A cause that is a mere class says nothing; an error without any is its own."""
    assert last_cause(Raised("a.b.C: why\n at x", "a.b.D")) == "why"
    assert last_cause(Raised("a.b.D")) == "a.b.D"
    assert causes(RuntimeError("\n one\ntwo")) == ["one"]


def test_names_and_passwords_are_javas_as_they_are() -> None:
    """JAAS reads quotes and backslashes as JSON does, but knows no escapes of other characters."""
    secured = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}
    kafka = KafkaSettings.model_validate({**secured, "sasl_username": "jürgen", "sasl_password": 'pä"ss\\€'})
    assert client_properties(kafka)["sasl.jaas.config"].endswith(
        'PlainLoginModule required username="jürgen" password="pä\\"ss\\\\€";'
    )

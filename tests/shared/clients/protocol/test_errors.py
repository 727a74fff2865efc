"""The mapping from broker errors to error classes, each with a name and a retriable flag."""

from __future__ import annotations

import pytest
from aiokafka import errors as kafka

from penstock.shared.clients.protocol.errors import CLASSES, CODE_OF, CODES, error_for_code, name_of, translate
from penstock.shared.common import errors as e


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_its_class_and_coordinates(code: int) -> None:
    """A broker's error code maps to its class. The message has the coordinates, Kafka's name of the error and the
    broker's message."""
    name, kind = CODES[code]
    error = error_for_code(code, "clicks-3", "the broker's words")
    assert type(error) is kind
    assert str(error) == f"clicks-3: {name}: the broker's words"


@pytest.mark.parametrize(("code", "name"), [(113, "STALE_MEMBER_EPOCH"), (114, "MISMATCHED_ENDPOINT_TYPE")])
def test_codes_that_aiokafka_lacks_have_kafkas_names(code: int, name: str) -> None:
    """Codes that aiokafka does not know have the names of Kafka's `Errors`."""
    assert name_of(code) == name


def test_an_unknown_code_is_an_error() -> None:
    """An error code that is not in the table maps to an error with its coordinates."""
    assert isinstance(error_for_code(9999, "clicks-3"), e.BrokerError)


def test_a_forbidden_topic_deletion_is_an_invalid_request() -> None:
    """With delete.topic.enable=false the broker returns TOPIC_DELETION_DISABLED for DeleteTopics from version 3 on."""
    error = error_for_code(CODE_OF["TOPIC_DELETION_DISABLED"], "topic clicks")
    assert isinstance(error, e.InvalidRequest)
    assert str(error) == "topic clicks: TOPIC_DELETION_DISABLED"


def test_aiokafkas_errors_with_a_code() -> None:
    """An aiokafka error with a broker's error code is translated by that code."""
    for kind in kafka.kafka_errors.values():
        if kind.errno in CODES and kind.errno > 0:
            assert type(translate(kind(), "here")) is CODES[kind.errno][1], kind
    assert str(translate(kafka.TopicAuthorizationFailedError("secrets"), "topic secrets")) == (
        "topic secrets: TOPIC_AUTHORIZATION_FAILED: secrets"
    )


@pytest.mark.parametrize(("theirs", "ours"), CLASSES, ids=lambda c: c.__name__)
def test_aiokafka_errors_without_a_code_map_by_class(theirs: type[Exception], ours: type[e.PenstockError]) -> None:
    """An aiokafka error without a code is translated by its class. The message starts with the coordinates."""
    error = translate(theirs("why"), "group g")
    assert isinstance(error, ours)
    assert str(error).startswith("group g: ")


def test_own_errors_are_not_translated() -> None:
    """The project's own errors pass through unchanged."""
    error = e.ProducerFenced("x")
    assert translate(error, "here") is error

"""The table from the broker's errors to ours: every one is named, and says whether to try again."""

from __future__ import annotations

import pytest
from aiokafka import errors as kafka

from penstock.shared.clients.connection.errors import CLASSES, CODES, error_for_code, translate
from penstock.shared.common import errors as e


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_its_class_and_its_place(code: int) -> None:
    """A broker's code becomes its class, with the place, Kafka's name and the broker's words in the message."""
    name, kind = CODES[code]
    error = error_for_code(code, "clicks-3", "the broker's words")
    assert type(error) is kind
    assert str(error) == f"clicks-3: {name}: the broker's words"


def test_a_code_nobody_knows() -> None:
    """A code that is not in the table is still an error with its place."""
    assert isinstance(error_for_code(9999, "clicks-3"), e.BrokerError)


def test_aiokafkas_errors_with_a_code() -> None:
    """An aiokafka error that stands for a broker's code is translated by the code."""
    for kind in kafka.kafka_errors.values():
        if kind.errno in CODES and kind.errno > 0:
            assert type(translate(kind(), "here")) is CODES[kind.errno][1], kind
    assert str(translate(kafka.TopicAuthorizationFailedError("secrets"), "topic secrets")) == (
        "topic secrets: TOPIC_AUTHORIZATION_FAILED: secrets"
    )


@pytest.mark.parametrize(("theirs", "ours"), CLASSES, ids=lambda c: c.__name__)
def test_every_other_class_has_its_own(theirs: type[Exception], ours: type[e.PenstockError]) -> None:
    """An aiokafka error without a code is translated by its class; the place comes first."""
    error = translate(theirs("why"), "group g")
    assert isinstance(error, ours)
    assert str(error).startswith("group g: ")


def test_ours_are_left_alone() -> None:
    """An error of ours is handed through as it is."""
    error = e.ProducerFenced("x")
    assert translate(error, "here") is error

"""The worker's offsets as a task's process asks for them."""

from __future__ import annotations

import asyncio

import pytest

from penstock.shared.common.errors import KafkaTimeout, RetriableError
from penstock.shared.connect.isolation.messages import Message, encoded, error_message, to_pairs
from penstock.shared.connect.isolation.questions import Questions
from penstock.shared.connect.isolation.remote_offsets import RemoteOffsets


async def test_offsets_are_asked_for_and_set() -> None:
    """By key, or all of a connector; those that were taken away are none of it."""
    said: list[Message] = []
    questions = Questions(said.append)
    store = RemoteOffsets(questions, "offsets")
    first = asyncio.ensure_future(store.get([b"a"]))
    second = asyncio.ensure_future(store.set({b"b": b"2", b"c": None}))
    third = asyncio.ensure_future(store.connector_offsets("src"))
    await asyncio.sleep(0)
    assert said == [
        {"ask": 1, "get": [encoded(b"a")]},
        {"ask": 2, "set": to_pairs({b"b": b"2", b"c": None})},
        {"ask": 3, "of": "src"},
    ]
    questions.on_answer({"answer": 3, "values": to_pairs({b"k": b"v", b"gone": None})})
    questions.on_answer({"answer": 2})
    questions.on_answer({"answer": 1, "values": to_pairs({b"a": b"1"})})
    assert (await first, await second, await third) == ({b"a": b"1"}, None, {b"k": b"v"})
    assert store.topic == "offsets"


async def test_a_refusal_is_the_askers() -> None:
    """With its words, and whether to try again."""
    questions = Questions(lambda _message: None)
    asked = asyncio.ensure_future(RemoteOffsets(questions, None).set({b"a": b"1"}))
    await asyncio.sleep(0)
    questions.on_answer({"answer": 1, **error_message(KafkaTimeout("the broker is away"))})
    with pytest.raises(RetriableError, match="the broker is away"):
        await asked

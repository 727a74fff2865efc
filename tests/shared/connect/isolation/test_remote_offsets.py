"""The worker's offsets as a task's process asks for them."""

from __future__ import annotations

import asyncio

import pytest

from shared.common.errors import RetriableError
from shared.connect.isolation.messages import Message, encoded, to_pairs
from shared.connect.isolation.remote_offsets import RemoteOffsets


async def test_answers_find_their_questions() -> None:
    """In whatever order they come; one that nobody waits for is let go."""
    said: list[Message] = []
    store = RemoteOffsets(said.append, "offsets")
    first = asyncio.ensure_future(store.get([b"a"]))
    second = asyncio.ensure_future(store.set({b"b": b"2", b"c": None}))
    third = asyncio.ensure_future(store.connector_offsets("src"))
    await asyncio.sleep(0)
    assert said == [
        {"ask": 1, "get": [encoded(b"a")]},
        {"ask": 2, "set": to_pairs({b"b": b"2", b"c": None})},
        {"ask": 3, "of": "src"},
    ]
    store.on_answer({"answer": 3, "values": to_pairs({b"k": b"v", b"gone": None})})
    store.on_answer({"answer": 2})
    store.on_answer({"answer": 1, "values": to_pairs({b"a": b"1"})})
    store.on_answer({"answer": 9})
    assert (await first, await second, await third) == ({b"a": b"1"}, None, {b"k": b"v"})
    assert store.topic == "offsets"


async def test_a_refusal_is_the_askers() -> None:
    """With its words, and whether to try again."""
    store = RemoteOffsets(lambda _message: None, None)
    asked = asyncio.ensure_future(store.set({b"a": b"1"}))
    await asyncio.sleep(0)
    store.on_answer({"answer": 1, "error": "the broker is away", "kind": "retriable"})
    with pytest.raises(RetriableError, match="the broker is away"):
        await asked

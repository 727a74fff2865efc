"""Questions over a link."""

from __future__ import annotations

import asyncio

import pytest

from penstock.shared.connect.errors import ConfigError, ConnectError
from penstock.shared.connect.isolation.messages import Message, error_message
from penstock.shared.connect.isolation.questions import Questions


async def test_answers_find_their_questions() -> None:
    """In whatever order they come; one that nobody waits for is let go."""
    said: list[Message] = []
    questions = Questions(said.append)
    first, second = (asyncio.ensure_future(questions.ask({"do": what})) for what in ("this", "that"))
    gone = asyncio.ensure_future(questions.ask({"do": "nothing"}))
    await asyncio.sleep(0)
    assert said == [{"ask": 1, "do": "this"}, {"ask": 2, "do": "that"}, {"ask": 3, "do": "nothing"}]
    gone.cancel()
    await asyncio.wait([gone])
    for number in (9, 3, 2, 1):
        questions.on_answer({"answer": number, "value": number})
    assert ((await first)["value"], (await second)["value"]) == (1, 2)
    assert repr(questions) == "<Questions, 0 open>"


async def test_an_error_is_the_askers() -> None:
    """With its words and its kind."""
    questions = Questions(lambda _message: None)
    asked = asyncio.ensure_future(questions.ask({}))
    await asyncio.sleep(0)
    questions.on_answer({"answer": 1, **error_message(ConfigError("no such column"))})
    with pytest.raises(ConfigError, match="no such column"):
        await asked


async def test_the_end_of_a_link_is_an_answer_to_all() -> None:
    """To those that are open and to those that come."""
    questions = Questions(lambda _message: None)
    asked = asyncio.ensure_future(questions.ask({}))
    await asyncio.sleep(0)
    questions.end(ConnectError("it has gone"))
    for one in (asked, questions.ask({})):
        with pytest.raises(ConnectError, match="it has gone"):
            await one

"""Answers that arrive later."""

from __future__ import annotations

from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse


def test_an_answer_comes_once() -> None:
    """Only the first response counts, for callbacks added before and after it."""
    later, seen = DelayedResponse(), []
    later.then(seen.append)
    later.complete(1)
    later.complete(2)
    later.then(seen.append)
    assert seen == [1, 1]
    assert repr(later) == "DelayedResponse(1)"

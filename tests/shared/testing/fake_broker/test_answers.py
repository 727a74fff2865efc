"""Answers that arrive later."""

from __future__ import annotations

from penstock.shared.testing.fake_broker.answers import DelayedAnswer


def test_an_answer_comes_once() -> None:
    """Only the first answer counts, for callbacks added before and after it."""
    later, seen = DelayedAnswer(), []
    later.then(seen.append)
    later.complete(1)
    later.complete(2)
    later.then(seen.append)
    assert seen == [1, 1]
    assert repr(later) == "DelayedAnswer(1)"

"""How a question names keys."""

from __future__ import annotations

import pytest

from penstock.api.http.problem import Problem
from penstock.api.streams.key_params import query_params, requested_keys


def test_a_question_is_asked_of_others_as_it_came() -> None:
    """Text stays text and bytes base64, so that the other instance asks its stores for the same keys."""
    keys = requested_keys(
        key=None, key_from="ä", key_to_base64="/wE=", key_base64=None, key_from_base64=None, key_to=None
    )
    assert keys == {"key": None, "key_from": "ä", "key_to": b"\xff\x01"}
    params = query_params({**keys, "rows_max": 3})
    assert params == {"key_from": "ä", "key_to_base64": "/wE=", "rows_max": 3}


def test_a_key_said_twice_is_refused() -> None:
    """The two ways to say a key exclude each other."""
    with pytest.raises(Problem, match="cannot be combined"):
        requested_keys(key="a", key_base64="YQ==")

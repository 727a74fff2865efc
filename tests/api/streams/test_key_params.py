"""Query parameters that name keys."""

from __future__ import annotations

import pytest

from penstock.api.http.problem import Problem
from penstock.api.streams.key_params import encode_query_params, requested_keys


def test_keys_round_trip_as_query_parameters() -> None:
    """Text keys stay text and bytes become base64, so another instance reads the same keys."""
    keys = requested_keys(
        key=None, key_from="ä", key_to_base64="/wE=", key_base64=None, key_from_base64=None, key_to=None
    )
    assert keys == {"key": None, "key_from": "ä", "key_to": b"\xff\x01"}
    params = encode_query_params({**keys, "rows_max": 3})
    assert params == {"key_from": "ä", "key_to_base64": "/wE=", "rows_max": 3}


def test_a_key_in_two_forms_is_a_problem() -> None:
    """A key given both as text and as base64 is a Problem."""
    with pytest.raises(Problem, match="cannot be combined"):
        requested_keys(key="a", key_base64="YQ==")

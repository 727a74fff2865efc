"""The benchmark of batches."""

from __future__ import annotations

import asyncio

import pytest

from bench import batch


@pytest.mark.soak
def test_all_parts_in_small() -> None:
    """The benchmark runs at a small scale and asserts that each batch reads every record."""
    found = asyncio.run(batch.run(20_000, 1))
    assert batch.TARGETS.keys() <= found.keys()

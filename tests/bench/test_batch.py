"""The benchmark of batches."""

from __future__ import annotations

import asyncio

import pytest

from bench import batch


@pytest.mark.soak
def test_all_parts_in_small() -> None:
    """On a real broker and Spark; the bench asserts by itself that each batch read every record."""
    found = asyncio.run(batch.run(20_000, 1))
    assert batch.ASKED.keys() <= found.keys()

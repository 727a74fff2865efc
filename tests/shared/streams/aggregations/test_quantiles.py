"""Quantiles: their accuracy, their merging and their state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.streams.aggregations.quantiles import KLL_K, RANKS, Quantiles


def fold(numbers: Any, aggregation: Quantiles | None = None) -> Any:
    aggregation = aggregation or Quantiles("x")
    state = aggregation.initial()
    for number in numbers:
        state = aggregation.add(state, {"x": number})
    return state


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=KLL_K // 2), st.integers(0, 60))
def test_few_values_are_exact(numbers: list[int], cut: int) -> None:
    """Up to the sketch's size a quantile is exact, also after a merge."""
    bound = Quantiles("x", [0, 0.5, 1])
    merged = bound.result(bound.merge(fold(numbers[:cut]), fold(numbers[cut:])))
    assert merged == bound.result(fold(numbers))
    assert merged is not None
    assert (merged[0], merged[2]) == (min(numbers), max(numbers))
    assert sum(n <= merged[1] for n in numbers) * 2 >= len(numbers)
    assert sum(n >= merged[1] for n in numbers) * 2 >= len(numbers)


def test_many_values_are_estimated() -> None:
    """The quantiles of a hundred thousand values are within a few percent of rank, with a state of a few KiB."""
    state = fold(range(100_000))
    result = Quantiles("x").result(state)
    assert result is not None
    assert all(abs(found / 100_000 - rank) < 0.04 for found, rank in zip(result, RANKS, strict=True))
    assert len(Quantiles("x").to_columns(state)[0]) < 8_000  # type: ignore[arg-type]


def test_nothing_gives_none() -> None:
    """Without a number the quantiles are None. The empty state survives its conversion to columns."""
    quantiles = Quantiles("x")
    assert quantiles.result(quantiles.from_columns(quantiles.to_columns(fold([None])))) is None


def test_the_state_has_its_quantiles_as_json() -> None:
    """Readers of the changelog see the result without a sketch library, and a restored state has the same result."""
    quantiles = Quantiles("x", (0.25, 0.75))
    state = fold([1, 2, 3, 4], quantiles)
    columns = quantiles.to_columns(state)
    assert (
        msgspec.json.decode(columns[1]) == quantiles.result(state) == quantiles.result(quantiles.from_columns(columns))
    )


def test_a_copy_is_another_sketch() -> None:
    """A change of the copy does not change the window's state."""
    quantiles, state = Quantiles("x"), fold([1])
    quantiles.add(quantiles.copy(state), {"x": 5})
    assert quantiles.result(state) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", ["7", [1], 10**400])
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    """A value that is not a number, or larger than any float, is rejected before it is added to the sketch."""
    with pytest.raises(DataError, match="quantiles"):
        fold([wrong])


@pytest.mark.parametrize("ranks", [(), (1.1,), (-0.1, 0.5)])
def test_ranks_are_shares(ranks: Any) -> None:
    """A rank below 0 or above 1, and an empty list of ranks, are rejected."""
    with pytest.raises(ConfigError, match="ranks"):
        Quantiles("x", ranks)

"""Quantiles of a field, estimated by a KLL sketch of Apache DataSketches.

A sketch takes a few KiB, whatever the number of values, and two sketches can be merged. With 99 % confidence, the rank
of an estimated quantile is off by at most about 1.3 %. Up to 200 values, quantiles are exact. The state contains the
sketch and its quantiles as JSON, so readers of the changelog or the lake need no sketch library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Column, ColumnValue, OfField, sketch_of

if TYPE_CHECKING:
    from datasketches import kll_doubles_sketch as Sketch  # noqa: N812

# With this size, the error of a rank is 1.3 %. A sketch is exact for up to this number of values.
KLL_K = 200
RANKS = (0.5, 0.9, 0.99)
RANKS_MAX = 400
"""The highest number of ranks. A state has the value of each, and its bytes are limited (`KLL_BYTES_MAX`)."""


class Quantiles(OfField["Sketch"]):
    """Estimated quantiles of a number field, as a list in the order of `ranks`; None without a value.

    Raises ConfigError if a rank is not from 0 to 1, if there is none, or if there are more than 400.
    """

    function = "quantiles"
    in_place = True
    state_columns = (Column("kll", "binary"), Column("json", "binary"))
    result_type = "json"

    def __init__(self, field: str, ranks: Sequence[float] = RANKS) -> None:
        super().__init__(field)
        if not ranks or not all(0 <= rank <= 1 for rank in ranks):
            raise ConfigError(f"quantiles({field!r}): ranks must be from 0 to 1, got {ranks!r}")
        if len(ranks) > RANKS_MAX:
            raise ConfigError(f"quantiles({field!r}): at most {RANKS_MAX} ranks, got {len(ranks)}")
        self.ranks = tuple(map(float, ranks))
        self.parameters = self.ranks

    def _bind_field(self, hint: Any) -> None:
        self._number_types(hint)

    def initial(self) -> Sketch:
        # Imported here, because readers of settings import this module without the extra `streams`.
        from datasketches import kll_doubles_sketch

        return kll_doubles_sketch(KLL_K)

    def add(self, state: Sketch, value: Any) -> Sketch:
        number = self._quantile_input(value)
        if number is not None:
            state.update(number)
        return state

    def _quantile_input(self, value: Any) -> float | None:
        field_value = self._field_value(value)
        return None if field_value is None else float(self._require_number(field_value, "float64"))

    def merge(self, earlier: Sketch, later: Sketch) -> Sketch:
        merged = self.initial()
        merged.merge(earlier)
        merged.merge(later)
        return merged

    def to_columns(self, state: Sketch) -> tuple[ColumnValue, ...]:
        return (bytes(state.serialize()), b"" if state.is_empty() else msgspec.json.encode(self.result(state)))

    def from_columns(self, columns: Sequence[Any]) -> Sketch:
        from datasketches import kll_doubles_sketch

        return sketch_of(kll_doubles_sketch.deserialize, columns[0])

    def result(self, state: Sketch) -> list[float] | None:
        return None if state.is_empty() else [float(q) for q in state.get_quantiles(self.ranks)]

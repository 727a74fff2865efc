"""Checks that the names of stores and aggregations can be columns of the lake's tables, and stores also folders.

The table `state` has a column for each store, the tables `closed/<store>` and `late/<store>` one for each aggregation.
These names must differ from the tables' other columns. Delta ignores case in names, and rejects blanks and some
punctuation. A store's name is also a folder: in a path, Spark or deltalake gives further characters a meaning of their
own. An aggregator with a lake checks its topology when it starts. The Spark jobs check before they write.

>>> require_names_in_lake_table("store 'visits': aggregation", ["n", "State"], CLOSED_COLUMNS, "closed/visits")
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: store 'visits': aggregation 'State': the lake's table closed/visits has a column 'state' \
of its own (case does not count): rename it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.lake.column_names import CLOSED_COLUMNS, LATE_COLUMNS, STATE_COLUMNS
from penstock.shared.streams.changelog.store_schema import StoreSchema

_FORBIDDEN = frozenset(" ,;{}()\n\t=/\\")
_FORBIDDEN_IN_PATHS = '| [ ] < > % # ? * : ^ ` "'


def require_lake_names(stores: Sequence[StoreSchema]) -> None:
    """Raise ConfigError if the lake cannot have columns named after these stores and aggregations, or a folder."""
    require_names_in_lake_table("store", [store.name for store in stores], STATE_COLUMNS, "state")
    for store in stores:
        if set(store.name) & set(_FORBIDDEN_IN_PATHS):
            raise ConfigError(
                f"store {store.name!r}: the lake has a folder of this name, which must not have any of "
                f"{_FORBIDDEN_IN_PATHS} in it: rename it"
            )
        names = [aggregation.name for aggregation in store.aggregations]
        owner = f"store {store.name!r}: aggregation"
        require_names_in_lake_table(owner, names, CLOSED_COLUMNS, f"closed/{store.name}")
        require_names_in_lake_table(owner, names, LATE_COLUMNS, f"late/{store.name}")


def require_names_in_lake_table(owner: str, names: Iterable[str], own: Iterable[str], table: str) -> None:
    """Raise ConfigError unless these names can be columns of the lake's `table`, which has the columns `own` too."""
    reserved = {name.lower(): name for name in own}
    seen: dict[str, str] = {}
    for name in names:
        if not name or _FORBIDDEN & set(name):
            raise ConfigError(
                f"{owner} {name!r}: the lake's table {table} has a column of this name, which must not be empty or "
                "have blanks or any of , ; { } ( ) = / \\ in it: rename it"
            )
        if (reserved_name := reserved.get(name.lower())) is not None:
            raise ConfigError(
                f"{owner} {name!r}: the lake's table {table} has a column {reserved_name!r} of its own (case does not "
                "count): rename it"
            )
        if (other := seen.setdefault(name.lower(), name)) is not name:
            raise ConfigError(
                f"{owner} {name!r}: the lake's table {table} has a column for {other!r} already (case does not count): "
                "rename it"
            )

"""Appends to a Delta table that count once: each carries the offsets it brings the table to (an edge).

An application's version in the table's log is an offset; an append that finds there another one than its writer left
belongs to a writer that lost its place, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from shared.common.errors import FatalError, RetriableError


class WriterFenced(FatalError):
    """Another writer has appended under the same application's name."""


def table_versions(uri: str, applications: list[str], options: Mapping[str, str]) -> dict[str, int]:
    """The version of each application that the table knows; none where there is no table. RetriableError."""
    try:
        table = DeltaTable(uri, storage_options=dict(options))
    except TableNotFoundError:
        return {}
    except (DeltaError, OSError) as e:
        raise RetriableError(f"{uri}: {e}") from e
    found = {application: table.transaction_version(application) for application in applications}
    return {application: version for application, version in found.items() if version is not None}


def append_once(
    uri: str,
    data: Any,
    versions: Mapping[str, tuple[int | None, int]],
    options: Mapping[str, str],
    partition_by: list[str] | None = None,
) -> None:
    """Append an Arrow table and bring each application from one version to the next, all in one commit.

    New columns are added to the table. Raises WriterFenced where the table knows another version of one (None: none),
    RetriableError where the store cannot be reached or another commit came first.
    """
    known = table_versions(uri, list(versions), options)
    for application, (before, _) in versions.items():
        if known.get(application) != before:
            raise WriterFenced(f"{uri}: {application} is at {known.get(application)}, and was left at {before}")
    transactions = [Transaction(application, after) for application, (_, after) in versions.items()]
    try:
        write_deltalake(
            uri,
            data,
            mode="append",
            schema_mode="merge",
            partition_by=partition_by,
            storage_options=dict(options),
            commit_properties=CommitProperties(app_transactions=transactions),
        )
    except (CommitFailedError, DeltaError, OSError) as e:
        raise RetriableError(f"{uri}: {e}") from e

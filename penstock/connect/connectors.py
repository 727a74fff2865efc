"""The connectors that are part of Penstock, with the names that configurations use.

Each class is imported when it is first used.
"""

from typing import TYPE_CHECKING

from penstock.shared.connect.builtin import builtin as _builtin

if TYPE_CHECKING:
    from penstock.shared.connect.connectors.delta import DeltaSinkConnector
    from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector, FileStreamSourceConnector
    from penstock.shared.connect.connectors.files import FilesSinkConnector
    from penstock.shared.connect.connectors.http import HttpSinkConnector, HttpSourceConnector
    from penstock.shared.connect.connectors.postgres.sink import PostgresSinkConnector
    from penstock.shared.connect.connectors.postgres.source import PostgresSourceConnector
    from penstock.shared.connect.connectors.verifiable import (
        MockSinkConnector,
        MockSourceConnector,
        VerifiableSinkConnector,
        VerifiableSourceConnector,
    )

__all__ = [
    "DeltaSinkConnector",
    "FileStreamSinkConnector",
    "FileStreamSourceConnector",
    "FilesSinkConnector",
    "HttpSinkConnector",
    "HttpSourceConnector",
    "MockSinkConnector",
    "MockSourceConnector",
    "PostgresSinkConnector",
    "PostgresSourceConnector",
    "VerifiableSinkConnector",
    "VerifiableSourceConnector",
]


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> type:
        return _builtin(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Kafka Connect in Python: connectors under Kafka Connect's names, settings and guarantees.

This package exports the API for connector authors. Most of its modules define the API, and its folders hold the runtime
and the built-in connectors, converters and transforms.
"""

from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.connect.config_def import NO_DEFAULT, ConfigDef, ConfigKey, Importance, Type, Width
from penstock.shared.connect.connector import Connector, ConnectorContext, SinkConnector, SourceConnector
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import ConnectRecord, Header, SinkRecord, SourceRecord
from penstock.shared.connect.schema import Field, Schema, SchemaType
from penstock.shared.connect.task import ErrantRecordReporter, SinkTask, SinkTaskContext, SourceTask, SourceTaskContext

__all__ = [
    "NO_DEFAULT",
    "ConfigDef",
    "ConfigKey",
    "ConnectError",
    "ConnectRecord",
    "Connector",
    "ConnectorContext",
    "DataError",
    "ErrantRecordReporter",
    "Field",
    "Header",
    "Importance",
    "RetriableError",
    "Schema",
    "SchemaType",
    "SinkConnector",
    "SinkRecord",
    "SinkTask",
    "SinkTaskContext",
    "SourceConnector",
    "SourceRecord",
    "SourceTask",
    "SourceTaskContext",
    "Type",
    "Width",
]

"""The Connect API: the classes for writing a connector, a converter or a transform."""

from penstock.shared.common.errors import ConfigError, DataError, RetriableError
from penstock.shared.common.public_names import publish as _publish
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.config_def import (
    NO_DEFAULT,
    ConfigDef,
    ConfigKey,
    ConfigValue,
    Importance,
    Password,
    Recommender,
    Type,
    Width,
)
from penstock.shared.connect.connector import (
    Connector,
    ConnectorContext,
    ExactlyOnceSupport,
    SinkConnector,
    SourceConnector,
)
from penstock.shared.connect.converter import Converter, HeaderConverter
from penstock.shared.connect.errors import ConnectError, MoreNeeded, ToleranceExceeded
from penstock.shared.connect.record import ConnectRecord, Header, SinkRecord, SourceRecord
from penstock.shared.connect.schema import Field, Schema, SchemaType
from penstock.shared.connect.task import (
    ErrantRecordReporter,
    OffsetStorageReader,
    SinkTask,
    SinkTaskContext,
    SourceTask,
    SourceTaskContext,
    Task,
    TransactionContext,
)
from penstock.shared.connect.transform import Predicate, Transformation

__all__ = [
    "NO_DEFAULT",
    "AllowedFiles",
    "ConfigDef",
    "ConfigError",
    "ConfigKey",
    "ConfigValue",
    "ConnectError",
    "ConnectRecord",
    "Connector",
    "ConnectorContext",
    "Converter",
    "DataError",
    "ErrantRecordReporter",
    "ExactlyOnceSupport",
    "Field",
    "Header",
    "HeaderConverter",
    "Importance",
    "MoreNeeded",
    "OffsetStorageReader",
    "Password",
    "Predicate",
    "Recommender",
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
    "Task",
    "ToleranceExceeded",
    "TransactionContext",
    "Transformation",
    "Type",
    "Width",
]

_publish(__name__, globals(), __all__)

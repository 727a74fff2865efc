"""The plugins that ship: their classes' paths below penstock.shared.connect."""

BUILTIN: tuple[str, ...] = (
    "connectors.file.FileStreamSourceConnector",
    "connectors.file.FileStreamSinkConnector",
    *(f"connectors.verifiable.{name}Connector" for name in ("MockSink", "MockSource")),
    *(f"connectors.verifiable.{name}Connector" for name in ("VerifiableSink", "VerifiableSource")),
    *("connectors.http.HttpSinkConnector", "connectors.http.HttpSourceConnector"),
    *("connectors.delta.DeltaSinkConnector", "connectors.files.FilesSinkConnector"),
    "connectors.postgres.sink.PostgresSinkConnector",
    "connectors.postgres.source.PostgresSourceConnector",
    *(
        f"converters.plain.{name}Converter"
        for name in ("Boolean", "ByteArray", "Double", "Float", "Integer", "Long", "Short", "String")
    ),
    *("converters.json.JsonConverter", "converters.avro.AvroConverter"),
    "converters.json_schema_converter.JsonSchemaConverter",
    "converters.simple_header.SimpleHeaderConverter",
    *(
        f"transforms.{name}{part}"
        for name in (
            *("cast.Cast", "content.InsertField", "content.MaskField", "content.SetSchemaMetadata"),
            *("headers.HeaderFrom", "shape.ExtractField", "shape.Flatten", "shape.HoistField", "shape.ReplaceField"),
            "timestamps.TimestampConverter",
        )
        for part in ("Key", "Value")
    ),
    *("transforms.headers.DropHeaders", "transforms.headers.InsertHeader", "transforms.shape.ValueToKey"),
    *(f"transforms.routing.{name}" for name in ("Filter", "RegexRouter", "TimestampRouter")),
    *(f"transforms.predicates.{name}" for name in ("HasHeaderKey", "RecordIsTombstone", "TopicNameMatches")),
)

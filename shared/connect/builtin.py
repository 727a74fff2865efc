"""The plugins that ship: their classes' paths below shared.connect."""

BUILTIN: tuple[str, ...] = (
    "connectors.file.FileStreamSourceConnector",
    "connectors.file.FileStreamSinkConnector",
    *(
        f"converters.plain.{name}Converter"
        for name in ("Boolean", "ByteArray", "Double", "Float", "Integer", "Long", "Short", "String")
    ),
    "converters.json.JsonConverter",
    "converters.simple_header.SimpleHeaderConverter",
)

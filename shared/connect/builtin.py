"""The plugins that ship: their classes' paths below shared.connect."""

BUILTIN: tuple[str, ...] = (
    "connectors.file.FileStreamSourceConnector",
    "connectors.file.FileStreamSinkConnector",
)

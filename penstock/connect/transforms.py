"""The transforms and predicates that are part of Penstock, with the names that configurations use.

Each class is imported when it is first used.
"""

from typing import TYPE_CHECKING

from penstock.shared.connect.builtin import builtin as _builtin

if TYPE_CHECKING:
    from penstock.shared.connect.transforms.cast import CastKey, CastValue
    from penstock.shared.connect.transforms.content import (
        InsertFieldKey,
        InsertFieldValue,
        MaskFieldKey,
        MaskFieldValue,
        SetSchemaMetadataKey,
        SetSchemaMetadataValue,
    )
    from penstock.shared.connect.transforms.headers import DropHeaders, HeaderFromKey, HeaderFromValue, InsertHeader
    from penstock.shared.connect.transforms.predicates import HasHeaderKey, RecordIsTombstone, TopicNameMatches
    from penstock.shared.connect.transforms.routing import Filter, RegexRouter, TimestampRouter
    from penstock.shared.connect.transforms.shape import (
        ExtractFieldKey,
        ExtractFieldValue,
        FlattenKey,
        FlattenValue,
        HoistFieldKey,
        HoistFieldValue,
        ReplaceFieldKey,
        ReplaceFieldValue,
        ValueToKey,
    )
    from penstock.shared.connect.transforms.timestamps import TimestampConverterKey, TimestampConverterValue

__all__ = [
    "CastKey",
    "CastValue",
    "DropHeaders",
    "ExtractFieldKey",
    "ExtractFieldValue",
    "Filter",
    "FlattenKey",
    "FlattenValue",
    "HasHeaderKey",
    "HeaderFromKey",
    "HeaderFromValue",
    "HoistFieldKey",
    "HoistFieldValue",
    "InsertFieldKey",
    "InsertFieldValue",
    "InsertHeader",
    "MaskFieldKey",
    "MaskFieldValue",
    "RecordIsTombstone",
    "RegexRouter",
    "ReplaceFieldKey",
    "ReplaceFieldValue",
    "SetSchemaMetadataKey",
    "SetSchemaMetadataValue",
    "TimestampConverterKey",
    "TimestampConverterValue",
    "TimestampRouter",
    "TopicNameMatches",
    "ValueToKey",
]


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> type:
        return _builtin(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""A sample event for a topology, made from the type of its source and the ingest's pointers.

>>> class Click(msgspec.Struct):
...     ms: float
...     page: str
>>> sample_event(("/user",), "/at", Click)
'{"ms":1.5,"page":"text","user":"ann","at":"2024-05-01T10:00:00Z"}'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from penstock.api.ingest.event import UNITS
from penstock.shared.common.errors import DataError
from penstock.shared.common.time_text import TimeUnit
from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.topology import ProcessorNode, SourceNode, Topology

KEY = "ann"
TIME = "2024-05-01T10:00:00Z"
TIME_MS = 1_714_557_600_000
# Beyond this depth of nested types a sample has null, because types may refer to themselves.
DEPTH_MAX = 8
_SAMPLES: Mapping[type, Any] = {
    inspect.BoolType: True,
    inspect.IntType: 1,
    inspect.FloatType: 1.5,
    inspect.DecimalType: "1.5",
    inspect.StrType: "text",
    inspect.BytesType: "",
    inspect.UUIDType: "00000000-0000-4000-8000-000000000000",
    inspect.DateTimeType: TIME,
    inspect.DateType: TIME[:10],
    inspect.TimeType: TIME[11:],
    inspect.TimeDeltaType: "PT1S",
}


def sample_event(
    key: tuple[str, ...],
    time: str | None,
    value_type: Any = dict,
    time_unit: TimeUnit = "ms",
    fields: Mapping[str, Any] | None = None,
) -> str:
    """Return a sample event as JSON, with values at the JSON pointers `key` and, unless it is None, `time`.

    If `value_type` is dict, the event also has each member of `fields`. A value at a pointer is text, unless
    `value_type` or `fields` has a number there; a time is then a number in `time_unit`. If the event is not valid for
    `value_type`, it has only key and time.
    """
    event: dict[str, Any] = {}
    samples = (fields,) if value_type is dict and fields else (_sample_of_type(inspect.type_info(value_type)), None)
    for sample in samples:
        event = dict(sample) if isinstance(sample, Mapping) else {}
        for pointer in key:
            _put_at_json_pointer(event, pointer, KEY, KEY)
        if time is not None:
            factor, divisor, _ = UNITS[time_unit]
            _put_at_json_pointer(event, time, TIME, TIME_MS * divisor // factor)
        if _accepts_event(event, value_type):
            break
    return msgspec.json.encode(event).decode()


def sample_event_type(topology: Topology, topic: str) -> Any:
    """Return the type of a sample event: the one that values of the source topic are decoded as, or `dict`."""
    sources = (node for node in topology.nodes.values() if isinstance(node, SourceNode) and node.topic == topic)
    return next((node.value_type for node in sources if node.value_type is not None), dict)


def sample_event_fields(topology: Topology, topic: str) -> dict[str, Any]:
    """Return fields for a sample event of a topic: those that aggregations of its records read, with valid values.

    Aggregations of another aggregation's results are left out.
    """
    names = [node.name for node in topology.nodes.values() if isinstance(node, SourceNode) and node.topic == topic]
    fields: dict[str, Any] = {}
    while names:
        name = names.pop()
        node = topology.nodes[name]
        stores = node.stores if isinstance(node, ProcessorNode) else ()
        for aggregation in (a for store in stores for a in topology.stores[store].aggregations):
            if aggregation.field is not None:
                fields[aggregation.field] = _sample_of_aggregated_field(aggregation, aggregation.field)
        # The children of an aggregation get its results, not events.
        if not stores:
            names += topology.children.get(name, [])
    return fields


def _sample_of_aggregated_field(aggregation: Aggregation[Any], field: str) -> str | int:
    try:
        aggregation.add(aggregation.initial(), {field: "text"})
    except DataError:
        return 1
    return "text"


def _accepts_event(event: dict[str, Any], value_type: Any) -> bool:
    try:
        msgspec.json.decode(msgspec.json.encode(event), type=value_type)
    except Exception:
        # The user's type may raise any exception.
        return False
    return True


def _put_at_json_pointer(event: dict[str, Any], pointer: str, text: str, number: int | str) -> None:
    """Set a value at a JSON pointer: `text`, or `number` if the sample has a number there.

    If `number` is not an integer, the sample's number stays.
    """
    *path, last = (part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/"))
    for part in path:
        inner = event.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        event = inner
    if not isinstance(event.get(last), int | float):
        event[last] = text
    elif isinstance(number, int):
        event[last] = number


def _sample_of_type(kind: inspect.Type, depth: int = 0) -> Any:
    """Return a value of the type as JSON has it; None if there is no sample."""
    if depth > DEPTH_MAX:
        return None
    if isinstance(kind, inspect.Metadata):
        return _sample_of_type(kind.type, depth)
    if isinstance(kind, inspect.UnionType):
        return next((s for s in (_sample_of_type(t, depth + 1) for t in kind.types) if s is not None), None)
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.EnumType):
        return next(iter(kind.cls)).value
    if isinstance(kind, inspect.StructType | inspect.DataclassType | inspect.TypedDictType):
        fields = {f.encode_name: _sample_of_type(f.type, depth + 1) for f in kind.fields if f.required}
        tag = {kind.tag_field: kind.tag} if isinstance(kind, inspect.StructType) and kind.tag_field else {}
        return tag | fields
    if isinstance(kind, inspect.CollectionType):
        return []
    if isinstance(kind, inspect.DictType):
        return {}
    return _SAMPLES.get(type(kind))

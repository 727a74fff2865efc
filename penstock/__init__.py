"""Penstock's public names, for imports of user code.

>>> from penstock import Count, Mean, StreamsBuilder
>>> builder = StreamsBuilder()
>>> windows = builder.stream("clicks").group_by_key().session_window(gap=1_800_000, grace=300_000)
>>> windows.aggregate("visits", clicks=Count(), ms=Mean("ms")).on_close().to("visits")
>>> builder.build().output_topics()
['visits', 'clicks-dlq', 'clicks-late']

Clients are in `penstock.clients`, streams in `penstock.streams`, test tools in `penstock.testing`, errors in
`penstock.errors`. This module has the most used names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.clients import (
        Admin,
        Consumer,
        ConsumerRecord,
        ConsumerSettings,
        KafkaSettings,
        NewTopic,
        Producer,
        ProducerRecord,
        ProducerSettings,
        RebalanceListener,
        RecordMetadata,
        TopicPartition,
        event_time_topic,
    )
    from penstock.streams import (
        Aggregate,
        CollectList,
        CollectSet,
        Count,
        CountDistinct,
        First,
        JoinWindows,
        Last,
        Max,
        Mean,
        Min,
        Processor,
        PunctuationType,
        Quantiles,
        Record,
        StreamsBuilder,
        StreamsSettings,
        StreamWorker,
        Sum,
        Topology,
    )

__version__: str
"""The version of the installed distribution."""

__all__ = [
    "Admin",
    "Aggregate",
    "CollectList",
    "CollectSet",
    "Consumer",
    "ConsumerRecord",
    "ConsumerSettings",
    "Count",
    "CountDistinct",
    "First",
    "JoinWindows",
    "KafkaSettings",
    "Last",
    "Max",
    "Mean",
    "Min",
    "NewTopic",
    "Processor",
    "Producer",
    "ProducerRecord",
    "ProducerSettings",
    "PunctuationType",
    "Quantiles",
    "RebalanceListener",
    "Record",
    "RecordMetadata",
    "StreamWorker",
    "StreamsBuilder",
    "StreamsSettings",
    "Sum",
    "TopicPartition",
    "Topology",
    "__version__",
    "event_time_topic",
]

_MODULES = ("penstock.clients", "penstock.streams")


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Imports a public name's module when the name is first used (PEP 562): `import penstock` is cheap."""
        if name == "__version__":
            from importlib.metadata import version

            return version("penstock")
        if name in __all__:
            for module in map(importlib.import_module, _MODULES):
                if name in module.__all__:
                    found: object = getattr(module, name)
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""Producer, consumer and admin client, with their settings, serializers, arguments and results.

Each client is imported when one of its names is first used, so a program that only produces does not load the consumer.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.public_names import publish as _publish
from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    GroupMetadata,
    Headers,
    OffsetAndMetadata,
    OnDelivery,
    ProducerRecord,
    RecordColumns,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.serialization import (
    Deserializer,
    Serializer,
    bytes_deserializer,
    bytes_serializer,
    double_deserializer,
    double_serializer,
    float_deserializer,
    float_serializer,
    integer_deserializer,
    integer_serializer,
    json_deserializer,
    json_serializer,
    long_deserializer,
    long_serializer,
    short_deserializer,
    short_serializer,
    string_deserializer,
    string_serializer,
    struct_deserializer,
)
from penstock.shared.common.settings import KafkaSettings

if TYPE_CHECKING:
    from penstock.services.consumer.handler_runner import HandlerRunner
    from penstock.services.consumer.settings import ConsumerServiceSettings
    from penstock.shared.clients.admin import (
        Admin,
        ClusterDescription,
        ConfigEntry,
        ConfigSynonym,
        GroupDescription,
        GroupListing,
        MemberDescription,
        NewTopic,
        OffsetChange,
        PartitionLag,
        ShiftBy,
        TopicDescription,
        event_time_topic,
    )
    from penstock.shared.clients.admin.types import BrokerDescription, PartitionDescription
    from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
    from penstock.shared.clients.interceptors import ConsumerInterceptor, ProducerInterceptor
    from penstock.shared.clients.producer import Deliveries, Delivery, Producer, ProducerSettings
    from penstock.shared.clients.producer.partitioner import Partitioner

__all__ = [
    "Admin",
    "BrokerDescription",
    "ClusterDescription",
    "Columns",
    "ConfigEntry",
    "ConfigSynonym",
    "Consumer",
    "ConsumerInterceptor",
    "ConsumerRecord",
    "ConsumerServiceSettings",
    "ConsumerSettings",
    "Deliveries",
    "Delivery",
    "Deserializer",
    "GroupDescription",
    "GroupListing",
    "GroupMetadata",
    "HandlerRunner",
    "Headers",
    "KafkaSettings",
    "MemberDescription",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetChange",
    "OnDelivery",
    "PackedBytes",
    "PartitionDescription",
    "PartitionLag",
    "Partitioner",
    "Producer",
    "ProducerInterceptor",
    "ProducerRecord",
    "ProducerSettings",
    "RebalanceListener",
    "RecordColumns",
    "RecordMetadata",
    "Serializer",
    "ShiftBy",
    "TopicDescription",
    "TopicPartition",
    "bytes_deserializer",
    "bytes_serializer",
    "double_deserializer",
    "double_serializer",
    "event_time_topic",
    "float_deserializer",
    "float_serializer",
    "integer_deserializer",
    "integer_serializer",
    "json_deserializer",
    "json_serializer",
    "long_deserializer",
    "long_serializer",
    "short_deserializer",
    "short_serializer",
    "string_deserializer",
    "string_serializer",
    "struct_deserializer",
]

_CLIENTS = (
    {
        "penstock.shared.clients.admin": (
            "Admin",
            "ClusterDescription",
            "ConfigEntry",
            "ConfigSynonym",
            "GroupDescription",
            "GroupListing",
            "MemberDescription",
            "NewTopic",
            "OffsetChange",
            "PartitionLag",
            "ShiftBy",
            "TopicDescription",
            "event_time_topic",
        ),
        "penstock.shared.clients.admin.types": ("BrokerDescription", "PartitionDescription"),
    },
    {
        "penstock.shared.clients.consumer": (
            "Consumer",
            "ConsumerSettings",
            "RebalanceListener",
        ),
        "penstock.shared.clients.interceptors": ("ConsumerInterceptor",),
    },
    {
        "penstock.shared.clients.producer": (
            "Deliveries",
            "Delivery",
            "Producer",
            "ProducerSettings",
        ),
        "penstock.shared.clients.interceptors": ("ProducerInterceptor",),
        "penstock.shared.clients.producer.partitioner": ("Partitioner",),
    },
    {
        "penstock.services.consumer.handler_runner": ("HandlerRunner",),
        "penstock.services.consumer.settings": ("ConsumerServiceSettings",),
    },
)
"""The clients that are not loaded yet: for each, its modules and their public names.

A client is loaded as a whole, so that the annotations of its classes can be resolved.
"""

_publish(__name__, globals(), [name for name in __all__ if name in globals()])


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Imports a client when one of its names is first used (PEP 562), and publishes its names."""
        for modules in _CLIENTS:
            if any(name in names for names in modules.values()):
                for module, names in modules.items():
                    loaded = _importlib.import_module(module)
                    globals().update({each: getattr(loaded, each) for each in names})
                _publish(__name__, globals(), [each for names in modules.values() for each in names])
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

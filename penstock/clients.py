"""Producer, consumer and admin, with their settings and the values they take and give."""

from shared.clients.admin import Admin, NewTopic, event_time_topic
from shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from shared.clients.producer import Producer, ProducerSettings
from shared.common.records import (
    Columns,
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)
from shared.common.settings import KafkaSettings

__all__ = [
    "Admin",
    "Columns",
    "Consumer",
    "ConsumerRecord",
    "ConsumerSettings",
    "GroupMetadata",
    "KafkaSettings",
    "NewTopic",
    "OffsetAndMetadata",
    "Producer",
    "ProducerRecord",
    "ProducerSettings",
    "RebalanceListener",
    "RecordMetadata",
    "TopicPartition",
    "event_time_topic",
]

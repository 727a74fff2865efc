"""Producer, consumer and admin, with their settings and the values they take and give."""

from penstock.shared.clients.admin import Admin, NewTopic, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.settings import KafkaSettings

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

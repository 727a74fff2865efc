"""Administration: `Admin`, its arguments and its results."""

from penstock.shared.clients.admin.admin import Admin, ShiftBy, describe_configs_if_authorized
from penstock.shared.clients.admin.types import (
    ClusterDescription,
    ConfigEntry,
    ConfigSynonym,
    GroupDescription,
    GroupListing,
    MemberDescription,
    NewTopic,
    OffsetChange,
    PartitionLag,
    TopicDescription,
    event_time_topic,
    max_message_bytes_with,
)

__all__ = [
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
    "describe_configs_if_authorized",
    "event_time_topic",
    "max_message_bytes_with",
]

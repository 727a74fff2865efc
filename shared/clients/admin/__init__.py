"""Administration: `Admin`, its arguments and its results."""

from penstock.shared.clients.admin.admin import Admin, ShiftBy
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
    "event_time_topic",
]

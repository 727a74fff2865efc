"""What the services and Kafka said of themselves, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, float]
"""Metric name to its value, summed over its labels; of a latency histogram also `<name>_bucket|<bound>`."""


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """What one service answered, or why it did not."""

    name: str
    url: str
    status: str
    """ok, failing or unreachable."""
    detail: str = ""
    checks: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    streams: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class KafkaSample:
    """What Kafka answered: brokers, and each group with its state, number of members and total lag."""

    cluster_id: str | None = None
    brokers: int | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    groups_omitted: int = 0
    """Groups that were not asked about, for there are too many."""
    error: str = ""

"""Samples of the services and of Kafka at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, float]
"""Maps a metric's name to its value, summed over its labels. A latency histogram adds `<name>_bucket|<bound>`."""


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """The answer of one service, or the reason why there is none."""

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
    """The answer of Kafka: brokers, and each group with its state, number of members and total lag."""

    cluster_id: str | None = None
    brokers: int | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    groups_omitted: int = 0
    """The number of groups left out of the sample because there are too many."""
    error: str = ""

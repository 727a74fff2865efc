"""The default topology for any topic of JSON events: sessions per key, counted."""

from __future__ import annotations

from penstock.shared.common.time_text import duration_ms
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology


def sessions(topic: str = "events", results: str = "sessions", gap: str = "30m", grace: str = "5m") -> Topology:
    """Return sessions of `topic` with the number of events, forwarded to `results` when they close."""
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(duration_ms(gap), duration_ms(grace))
    windows.aggregate("sessions", events=Count()).on_close().to(results)
    return builder.build()

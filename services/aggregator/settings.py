"""The aggregator's settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from api.settings import GuardedSettings
from shared.common.settings import PositiveMs, Section
from shared.streams.settings import StreamsSettings


class CompactionSettings(Section):
    """When and how the instance that owns partition 0 starts a compaction; without a lake none is started."""

    enabled: bool = True
    interval_ms: PositiveMs = Field(300_000, description="wall-clock time between two starts, on a grid")
    retry_backoff_ms: PositiveMs = Field(10_000, description="after a failed job; doubles up to the interval")
    timeout_ms: PositiveMs = Field(3_600_000, description="a job that runs longer is stopped and counts as failed")
    spark_master: str = "local[*]"
    spark_memory: Annotated[str, Field(pattern=r"^\d+[mg]$")] = "1g"
    spark_conf: dict[str, str] = Field(default={}, description="passed on to Spark")
    delete_covered: bool = Field(
        True, description="delete changelog records that the snapshot before the current one covers"
    )


class AggregatorSettings(GuardedSettings):
    """Runs a topology: windows, punctuation, exactly-once state, periodic compaction."""

    topology: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = Field(
        "", validate_default=True, description="module:function that returns a shared.streams Topology"
    )
    topology_options: dict[str, str] = Field({}, description="keyword arguments for that function")
    streams: StreamsSettings = StreamsSettings()
    compaction: CompactionSettings = CompactionSettings()

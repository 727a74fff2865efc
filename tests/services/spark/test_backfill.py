"""What a backfill refuses before Spark does anything."""

from __future__ import annotations

import pytest

from penstock.services.spark.backfill import require_whole_partitions
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.dsl import StreamsBuilder


def test_a_topology_that_needs_more_than_its_partition_is_refused() -> None:
    """Where keys change before a window, records go through a topic of the application's own, which is named."""
    builder = StreamsBuilder()
    rekeyed = builder.stream("in").group_by(lambda value: value["k"])
    rekeyed.session_window(10).aggregate("s", n=Count()).on_close().to("out")
    with pytest.raises(ConfigError, match=r"this topology needs \S*repartition"):
        require_whole_partitions(builder.build())


def test_a_topology_of_whole_partitions_is_taken() -> None:
    """One source, grouped by its own key, needs nothing else."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    require_whole_partitions(builder.build())

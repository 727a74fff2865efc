"""Test tools: the topology test driver, a clock that stands still, and the replay of recorded Kafka Streams cases."""

from shared.testing.manual_clock import ManualClock
from shared.testing.topology_test_driver import TopologyTestDriver

__all__ = ["ManualClock", "TopologyTestDriver"]

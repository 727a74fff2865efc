"""Test tools: the topology test driver, a clock that stands still, and a Kafka cluster in the test's own process."""

from penstock.shared.common.public_names import publish as _publish
from penstock.shared.testing.fake_broker import (
    Action,
    Api,
    Close,
    Control,
    Delay,
    Drop,
    ErrorCode,
    Fail,
    FakeCluster,
    Hook,
    Message,
    Request,
    Respond,
)
from penstock.shared.testing.manual_clock import ManualClock
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

__all__ = [
    "Action",
    "Api",
    "Close",
    "Control",
    "Delay",
    "Drop",
    "ErrorCode",
    "Fail",
    "FakeCluster",
    "Hook",
    "ManualClock",
    "Message",
    "Request",
    "Respond",
    "TopologyTestDriver",
]

_publish(__name__, globals(), __all__)

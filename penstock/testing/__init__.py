"""Test tools: the topology test driver, a manual clock, and a Kafka cluster in the test's own process."""

from typing import TYPE_CHECKING

from penstock.shared.common.extras import needs as _needs
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

if TYPE_CHECKING:
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

_LAZY = "TopologyTestDriver"
_publish(__name__, globals(), [name for name in __all__ if name != _LAZY])


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Imports the test driver when it is first used: the rest does not need the extra `streams`."""
        if name == _LAZY:
            with _needs("penstock.testing.TopologyTestDriver", "streams"):
                from penstock.shared.testing.topology_test_driver import TopologyTestDriver
            globals()[name] = TopologyTestDriver
            _publish(__name__, globals(), [name])
            return TopologyTestDriver
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""A Kafka cluster for tests, in one process, over real sockets; see `FakeCluster`.

It is modelled on franz-go's kfake. It speaks Kafka's wire protocol, keeps real record batches, and checks sequence
numbers, epochs, generations and transactions as Kafka does. A test can delay any request, fail it or answer it itself.
"""

from penstock.shared.testing.fake_broker.cluster import FakeCluster
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.faults import Action, Close, Control, Delay, Drop, Fail, Hook, Respond
from penstock.shared.testing.fake_broker.protocol import Api, ErrorCode
from penstock.shared.testing.fake_broker.request import Request

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
    "Message",
    "Request",
    "Respond",
]

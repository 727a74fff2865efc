"""The consumer."""

from penstock.shared.clients.consumer.consumer import Consumer
from penstock.shared.clients.consumer.rebalance_listener import RebalanceListener
from penstock.shared.clients.consumer.settings import ConsumerSettings, ReadingSettings

__all__ = ["Consumer", "ConsumerSettings", "ReadingSettings", "RebalanceListener"]

"""The consumer."""

from shared.clients.consumer.consumer import Consumer
from shared.clients.consumer.listener import RebalanceListener
from shared.clients.consumer.settings import ConsumerSettings, ReadingSettings

__all__ = ["Consumer", "ConsumerSettings", "ReadingSettings", "RebalanceListener"]

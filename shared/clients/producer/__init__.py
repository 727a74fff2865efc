"""The producer."""

from penstock.shared.clients.producer.delivery import Deliveries, Delivery
from penstock.shared.clients.producer.producer import Producer
from penstock.shared.clients.producer.settings import ProducerSettings

__all__ = ["Deliveries", "Delivery", "Producer", "ProducerSettings"]

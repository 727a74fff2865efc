"""The producer."""

from shared.clients.producer.delivery import Deliveries, Delivery
from shared.clients.producer.interceptors import ProducerInterceptor
from shared.clients.producer.producer import Producer
from shared.clients.producer.settings import ProducerSettings

__all__ = ["Deliveries", "Delivery", "Producer", "ProducerInterceptor", "ProducerSettings"]

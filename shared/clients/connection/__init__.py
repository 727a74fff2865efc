"""A client's connections to a cluster, over aiokafka's client: sockets, metadata, coordinators and offset lookups."""

from penstock.shared.clients.connection.connection import UNREACHED_LOG_MS, Connection, default_client_id, translated
from penstock.shared.clients.connection.offsets import by_leader, list_offsets

__all__ = ["UNREACHED_LOG_MS", "Connection", "by_leader", "default_client_id", "list_offsets", "translated"]

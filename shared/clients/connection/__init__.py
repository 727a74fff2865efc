"""A client's connections to a cluster, over aiokafka's client: sockets, metadata, coordinators and offset lookups."""

from penstock.shared.clients.connection.connection import Connection
from penstock.shared.clients.connection.offsets import by_leader, list_offsets

__all__ = ["Connection", "by_leader", "list_offsets"]

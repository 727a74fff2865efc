"""Groups the routers of Confluent REST Proxy's interfaces for the services."""

from __future__ import annotations

from fastapi import APIRouter

from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.api.rest_proxy.v2 import v2_consumers_router, v2_metadata_router, v2_produce_router
from penstock.api.rest_proxy.v3_groups import v3_groups_router
from penstock.api.rest_proxy.v3_metadata import v3_metadata_router
from penstock.api.rest_proxy.v3_produce import v3_produce_router
from penstock.shared.clients.admin import Admin


def metadata_routers(admin: Admin) -> list[APIRouter]:
    """Return the routers of REST Proxy v2 and v3 that store no records."""
    return [v2_metadata_router(admin), v2_consumers_router(), v3_metadata_router(admin), v3_groups_router(admin)]


def produce_routers(producer: RestProducer, admin: Admin) -> list[APIRouter]:
    """Return the routers that store records."""
    return [v2_produce_router(producer), v3_produce_router(producer, admin)]

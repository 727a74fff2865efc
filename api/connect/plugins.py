"""Kafka Connect's REST: the routes of plugins and of loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from penstock.api.connect.body import flag, json_body, name_of
from penstock.api.http.problem import json_response
from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.herder.errors import BadRequest
from penstock.shared.connect.herder.loggers import level_number
from penstock.shared.connect.properties import text_map

if TYPE_CHECKING:
    from penstock.api.connect.routes import Herder


def plugin_routes(herder: Herder) -> APIRouter:
    """What is installed, and what may be set."""
    router = APIRouter(prefix="/connector-plugins", tags=["plugins"])

    @router.get("", summary="The connectors that are installed; with `connectorsOnly=false` every plugin")
    async def plugins(request: Request) -> Response:
        return json_response(herder.plugin_list(connectors_only=flag(request, "connectorsOnly", default=True)))

    @router.get("/{name}/config", summary="A plugin's settings")
    async def plugin_config(request: Request) -> Response:
        return json_response(herder.plugin_config(name_of(request)))

    @router.put("/{name}/config/validate", summary="What is wrong with a connector's config")
    async def validate(request: Request) -> Response:
        config = text_map(await json_body(request), "config")
        try:
            return json_response(await herder.validate(config, name_of(request)))
        except ConfigError as e:  # Kafka Connect answers so for a class that there is not
            return json_response({"error_code": 500, "message": str(e)}, 500)

    return router


def admin_routes(herder: Herder) -> APIRouter:
    """Loggers' levels, of this worker or with `scope=cluster` of all."""
    router = APIRouter(prefix="/admin/loggers", tags=["admin"])

    @router.get("", summary="Loggers with a level of their own")
    async def levels() -> Response:
        return json_response(herder.loggers.levels())

    @router.get("/{name}", summary="One logger's level")
    async def level(request: Request) -> Response:
        return json_response(herder.loggers.level(name_of(request)))

    @router.put("/{name}", summary="Set a level for a logger and all below it")
    async def set_level(request: Request) -> Response:
        body = await json_body(request)
        wanted = body.get("level") if isinstance(body, dict) else None
        if not isinstance(wanted, str):
            raise BadRequest("Desired 'level' parameter was not specified in request.")
        try:
            level_number(wanted)
        except ConfigError as e:
            raise ConnectorNotFound(str(e)) from None  # 404, as Kafka Connect has it
        scope = request.query_params.get("scope", "worker").lower()
        if scope == "cluster":
            await herder.set_cluster_level(name_of(request), wanted)
            return Response(status_code=204)
        return json_response(herder.loggers.set_level(name_of(request), wanted))

    return router
